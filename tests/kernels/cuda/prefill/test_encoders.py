"""Encoders on a GPU against the formula: texts of several lengths in one step, and the bytes they need."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.sizes import cuda_buffers
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from tests.edgeinfer.encoders.make_encoder_goldens import encoder_of
from tests.kernels.cuda.decoders import CONTEXT, FLOATS_AGREE, Decoder, opened
from tests.random_encoders import ENCODER_ZOO

REFUSED = {"jina-bert-v2": "a norm of whole rows", "bert-odd": "need a multiple of 16"}
ENCODERS = [name for name in ENCODER_ZOO if name not in REFUSED]
LENGTHS = (1, 7, 30, 64, 2, 21)
"""A text is one token, another longer than a tile."""
CHUNK = 128
AGREE = 3 * FLOATS_AGREE
"""The random nomic-bert moves by 2.2e-3 if only its embeddings are rounded to float16."""


@contextmanager
def open_encoder(name: str, variant: str, folder: Path) -> Iterator[Decoder]:
    with opened(encoder_of(name, variant), folder) as encoder:
        yield encoder


def reference_rows(encoder: Decoder, ids: list[int]) -> npt.NDArray[np.float64]:
    state = DecoderState.allocate(encoder.specification, CONTEXT, "f32")
    backend = ReferenceBackend(encoder.specification, encoder.weights, state, np.float64)
    x = backend.embed(ids)
    backend.forward_texts(x, LENGTHS)
    return np.asarray(backend.final_norm(x), np.float64)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("variant", ["plain", "quantized"])
def test_texts_in_one_step_equal_the_reference(name: str, variant: str, device: str, tmp_path: Path) -> None:
    with open_encoder(name, variant, tmp_path) as encoder:
        ids = encoder.ids(sum(LENGTHS))
        expected = reference_rows(encoder, ids)
        backend = encoder.backend(device, chunk=CHUNK)
        try:
            x = backend.embed(ids)
            backend.forward_texts(x, LENGTHS)
            given = backend.final_norm(x)
        finally:
            backend.close()
    assert np.linalg.norm(given - expected) < AGREE * np.linalg.norm(expected)


@pytest.mark.default_cases
@pytest.mark.parametrize("name", ENCODERS)
def test_predicted_sizes_equal_allocated_sizes(name: str, tmp_path: Path) -> None:
    with open_encoder(name, "plain", tmp_path) as encoder:
        spec, weights, options = encoder.specification, encoder.weights, DeviceOptions(chunk=CHUNK)
        parts = count_parts(spec, weights, CONTEXT, torch.device("cpu"), options)
        sizes = ModelSizes.of(spec, weights)
    blocks = [block for layer in sizes.layers for block in layer.undivided]
    held = sum(part.nbytes for part in parts if part.name.endswith(("attention", "embedding norm")))
    undivided = sum(block.undivided_device_bytes() for block in blocks)
    assert undivided + sizes.rope_device_bytes(CONTEXT) == held
    named = {part.name: part.nbytes for part in parts}
    assert sizes.head_device_bytes() == named["head"]
    assert cuda_buffers.workspace_bytes(sizes, CONTEXT, CHUNK) == named["workspace"]


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoder_without_a_kernel_is_refused(name: str, tmp_path: Path) -> None:
    with open_encoder(name, "plain", tmp_path) as encoder:
        sizes = ModelSizes.of(encoder.specification, encoder.weights)
    with pytest.raises(UnsupportedOnDeviceError, match=REFUSED[name]):
        [block.undivided_device_bytes() for layer in sizes.layers for block in layer.undivided]
