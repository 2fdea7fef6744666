"""Block drafters on the CPU against the numpy formula."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.model_config.layers.block_drafts import BlockDraftModel, read_block_drafts
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.speculation.heads.dflash.random_dflash import MASK, VARIANTS, RandomDFlash
from tests.kernels.conftest import BEST, built_kernels
from tests.random_models import RandomModel

CONTEXT, STATES = 512, 400
DRAFTS = {
    **VARIANTS,
    "odd": RandomDFlash(width=60, heads=3, kv_heads=1, head_dim=20, feed_forward=63, own_tables=True),
    "Q8_0": RandomDFlash(format="Q8_0", own_tables=True, block_size=16),
    "one key head": RandomDFlash(kv_heads=1, windows=(False, True), own_tables=True),
}


def read(made: RandomDFlash, folder: Path) -> BlockDraftModel:
    target = RandomModel("llama", layers=4, width=made.width).write(folder / "target.gguf")
    file, draft = GGUFFile.open(target), GGUFFile.open(made.write(folder / "draft.gguf"))
    config = read_config(file)
    return read_block_drafts(draft, config, read_weights(file, config))


def on_cpu(model: BlockDraftModel, kind: CacheType, threads: int, repack: bool = True) -> CpuBackend:
    kernels = built_kernels(BEST, kernel_units(model.weights))
    in_file = [] if repack else model.weights.matrices()
    options = CpuOptions(64, threads, in_file)
    return CpuBackend(model.spec, model.weights, model.allocate_state(CONTEXT, kind), kernels, options)


def block_logits(
    backend: CpuBackend | ReferenceBackend, model: BlockDraftModel, states: np.ndarray, parts: list[int]
) -> np.ndarray:
    """The logits of a block after the states, which are processed in parts that end there."""
    first = 0
    for last in parts:
        backend.set_hidden(states[first:last], first)
        backend.forward_layers(backend.embed([MASK] * (last - first)), first, [0])
        first = last
    x = backend.embed([7, *[MASK] * (model.block_size - 1)])
    backend.forward_layers(x, first, range(1, len(model.spec.layers)))
    return backend.logits(x)


@pytest.mark.default_cases(15)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_block_equals_the_formula(tmp_path: Path, name: str, threads: int) -> None:
    model = read(DRAFTS[name], tmp_path)
    fused = model.spec.layers[0].blocks[0].block
    states = np.random.default_rng(3).standard_normal((STATES, fused.features)).astype(np.float32)
    kernel = on_cpu(model, "f32", threads, repack=threads < 3)
    state = model.allocate_state(CONTEXT, "f32")
    formula = ReferenceBackend(model.spec, model.weights, state, np.float64)
    for parts in ([1], [3, 19, 20], [64, 128, 192, 256, 320, 384, 385, 400]):
        expected = block_logits(formula, model, states, [parts[-1]])
        actual = block_logits(kernel, model, states, parts)
        near = 0.03 if name == "Q8_0" else 2e-5
        np.testing.assert_allclose(actual, expected, atol=near * np.abs(expected).max())
    kernel.close()


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "fp8", "q4_0+f16"])
def test_caches_of_all_types_hold_the_keys_of_states_and_of_a_block(tmp_path: Path, kind: CacheType) -> None:
    model = read(replace(VARIANTS["windows"], block_size=16), tmp_path)
    fused = model.spec.layers[0].blocks[0].block
    states = np.random.default_rng(3).standard_normal((60, fused.features)).astype(np.float32)
    kernel = on_cpu(model, kind, 2)
    state = model.allocate_state(CONTEXT, "f32")
    formula = ReferenceBackend(model.spec, model.weights, state, np.float64)
    expected = block_logits(formula, model, states, [60])
    actual = block_logits(kernel, model, states, [33, 49, 60])
    near = {"f16": 3e-3, "q8_0": 0.05}.get(kind, 0.3)
    assert np.abs(actual - expected).max() <= near * np.abs(expected).max()
    kernel.close()


def test_the_keys_of_a_block_are_replaced_by_those_of_its_tokens(tmp_path: Path) -> None:
    model = read(VARIANTS["plain"], tmp_path)
    fused = model.spec.layers[0].blocks[0].block
    states = np.random.default_rng(3).standard_normal((40, fused.features)).astype(np.float32)
    kernel, again = (on_cpu(model, "f32", 2) for _ in range(2))
    block_logits(kernel, model, states, [30])
    kernel.set_hidden(states[30:], 30)
    kernel.forward_layers(kernel.embed([MASK] * 10), 30, [0])
    x = kernel.embed([7, *[MASK] * (model.block_size - 1)])
    kernel.forward_layers(x, 40, range(1, len(model.spec.layers)))
    np.testing.assert_array_equal(kernel.logits(x), block_logits(again, model, states, [30, 40]))
    kernel.close()
    again.close()


def test_a_markov_head_is_a_decoder_without_layers(tmp_path: Path) -> None:
    head = read(RandomDFlash(rank=32, format="Q8_0", own_tables=True), tmp_path).markov
    assert head is not None
    kernels = built_kernels(BEST, kernel_units(head.weights))
    kernel = CpuBackend(head.spec, head.weights, DecoderState(), kernels, CpuOptions(64, 2))
    formula = ReferenceBackend(head.spec, head.weights, DecoderState(), np.float64)
    for ids in ([5], [5, 70, 287]):
        expected = formula.logits(formula.embed(ids))
        actual = kernel.logits(kernel.embed(ids))
        assert np.abs(actual - expected).max() <= 0.03 * np.abs(expected).max()
    kernel.close()
