"""A decoder cut at any layer gives what the whole one gives."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer_kernels.backend import LayerCache
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.device_parts import DeviceOptions
from edgeinfer_kernels.cuda.step_shapes import Tuning
from edgeinfer_offload.split_backend import SplitBackend
from tests.kernels.cuda.decoders import CONTEXT, SMALL, Decoder, opened, worst
from tests.random_models import ZOO

CHUNK = 16


@contextmanager
def split(decoder: Decoder, device: str, at: int, kernels: Kernels) -> Iterator[SplitBackend]:
    """The decoder's layers before `at` on the CPU, the others on the device."""
    facts, weights = decoder.specification, decoder.weights
    lower = facts.of_layers(0, at)
    caches = [LayerCache.allocate(layer.attention, CONTEXT, "f32") for layer in lower.layers]
    below = CpuBackend(lower, weights.below(at), caches, kernels, batch=CHUNK, threads=2, head=False)
    above = CudaBackend(
        facts.of_layers(at, len(facts.layers)),
        weights.above(at),
        CONTEXT,
        torch.device(device),
        DeviceOptions(chunk=CHUNK, embeds=False),
        tuning=Tuning() if device == "cuda" else SMALL,
    )
    backend = SplitBackend(below, above)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize(("name", "at"), [("llama", 1), ("llama", 2), ("gemma3", 1), ("starcoder2", 2)])
def test_a_prompt_and_steps_give_the_logits_of_the_whole(
    device: str, kernels: Kernels, tmp_path: Path, name: str, at: int
) -> None:
    with opened(ZOO[name], tmp_path) as decoder, split(decoder, device, at, kernels) as backend:
        ids = decoder.ids(15)
        found = {}
        done = 0
        for count in (10, 1, 3, 1):
            x = backend.embed(ids[done : done + count])
            backend.all_layers(x, done)
            found[done + count - 1] = backend.logits(x[-1:])[0].astype(np.float64)
            done += count
        assert worst(found, decoder.reference_logits(ids)) < 0.05


def test_choices_above_are_those_of_the_logits(device: str, kernels: Kernels, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder, split(decoder, device, 1, kernels) as backend:
        ids = decoder.ids(4)
        x = backend.embed(ids)
        backend.all_layers(x, 0)
        token = int(backend.logits(x[-1:])[0].argmax())
        for start in range(4, 8):
            chosen = backend.choose(token, start)
            again = backend.embed([token])
            backend.all_layers(again, start)
            assert chosen == int(backend.logits(again)[0].argmax())
            token = chosen


def test_rows_that_stayed_below_have_no_logits(device: str, kernels: Kernels, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder, split(decoder, device, 1, kernels) as backend:
        with pytest.raises(ValueError, match="have not been up all layers"):
            backend.logits(backend.embed([1, 2]))
        with pytest.raises(ValueError, match="17 tokens in one step"):
            backend.embed(list(range(17)))
