"""Layers on several GPUs, one after another: the logits, samples and states of one GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
from edgeinfer_kernels.stages import entered_stages, layer_parts, pipeline_refusal
from edgeinfer_offload.runtime.pipeline_backend import LaterPart, PipelineBackend
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, SMALL, STEP_TOKENS, Decoder, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

CHUNK = 16
ROUNDING = 2e-2 if HAS_GPU else 2e-3
"""On a GPU sums of squares are added in any order. Interpreted, products are numpy's, whose kernels for some
processors add in an order that depends on the shape: a key in float16 may be rounded otherwise.
"""
MODELS: dict[str, RandomModel] = {
    "dense": replace(ZOO["llama"], layers=3),
    "tied, windows": ZOO["gemma3"],
    "experts": replace(ZOO["llama"], layers=3, experts=4, experts_per_token=2),
}


def devices(count: int) -> list[torch.device]:
    """Different GPUs as far as there are any."""
    here = torch.cuda.device_count()
    return [torch.device("cuda", index % here) if here else torch.device("cpu") for index in range(count)]


@contextmanager
def pipeline(decoder: Decoder, counts: Sequence[int]) -> Iterator[PipelineBackend]:
    parts = layer_parts(decoder.specification, decoder.weights, counts)
    first: CudaBackend | None = None
    later: list[LaterPart] = []
    for device, (spec, weights) in zip(devices(len(parts)), parts, strict=True):
        options = DeviceOptions(chunk=CHUNK, step_tokens=STEP_TOKENS)
        if first is None:
            first = CudaBackend(spec, weights, CONTEXT, device, options, tuning=SMALL)
            continue
        options = replace(options, stages=entered_stages(spec))
        entry = ExchangeBuffer(device, CHUNK, spec.hidden_size, 0)
        shard = GpuShard(spec, weights, CONTEXT, device, options, entry, tuning=SMALL)
        shard.begin_at_exchange_buffer()
        later.append(LaterPart(shard, entry))
    assert first is not None
    backend = PipelineBackend(first, later)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("name", "counts"), [("dense", (1, 2)), ("dense", (1, 1, 1)), ("experts", (2, 1))])
def test_parts_have_the_logits_of_one_gpu(name: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    with opened(MODELS[name], tmp_path) as decoder:
        ids, one = decoder.ids(24), decoder.backend(str(devices(1)[0]))
        expected = read(one, ids, (16, 5, 1))
        sampled = one.sample_next(ids[0], 22)
        held = one.snapshot(22)
        with pipeline(decoder, counts) as several:
            found = read(several, ids, (16, 5, 1))  # type: ignore[arg-type]
            assert several.sample_next(ids[0], 22) == sampled
            for array, other in zip(several.snapshot(22), held, strict=True):
                np.testing.assert_allclose(
                    array.astype(np.float32), other.astype(np.float32), rtol=0, atol=ROUNDING
                )
        one.close()
    for at, logits in expected.items():
        np.testing.assert_allclose(found[at], logits, rtol=0, atol=ROUNDING)


def test_states_are_rewound_and_restored_in_all_parts(tmp_path: Path) -> None:
    with opened(MODELS["dense"], tmp_path) as decoder, pipeline(decoder, (2, 1)) as backend:
        ids = decoder.ids(20)
        first = read(backend, ids, (12, 1))  # type: ignore[arg-type]
        held = [array.copy() for array in backend.snapshot(12)]
        assert backend.rewind(4) == 4
        again = read(backend, ids[4:], (8, 1), start=4)  # type: ignore[arg-type]
        np.testing.assert_allclose(again[8], first[12], rtol=0, atol=1e-2)
        backend.restore(held, 12)
        x = backend.embed(ids[12:13])
        backend.forward(x, 12)
        np.testing.assert_allclose(backend.logits(x)[0], first[12], rtol=0, atol=ROUNDING)
        with pytest.raises(ValueError, match="of another cache"):
            backend.restore(held[:1], 12)
        with pytest.raises(ValueError, match=f"saw {len(held) + 1} arrays, wanted {len(held)}"):
            backend.restore([*held, held[0]], 12)


def test_what_reads_other_layers_is_refused(tmp_path: Path) -> None:
    with opened(MODELS["dense"], tmp_path) as decoder:
        assert pipeline_refusal(decoder.specification) == ""
        with pytest.raises(ValueError, match=r"saw parts of \[1, 1\] layers, wanted 3 in all"):
            layer_parts(decoder.specification, decoder.weights, (1, 1))
    with opened(ZOO["gemma3n"], tmp_path) as decoder:
        assert pipeline_refusal(decoder.specification).startswith("layers read keys, values or inputs")
