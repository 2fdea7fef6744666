"""Sparse experts equal the dense ones, and read no inactive neuron."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.runtime.abi import SPARSE_TOKENS
from edgeinfer_kernels.cpu.sparse import SparseLayers, sparse_block, sparse_index, why_dense
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.conftest import BEST, PORTABLE, built_kernels, isas_and_formats
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

Rows = npt.NDArray[np.float32]
MODELS = {
    "gated": replace(ZOO["smallthinker"], width=256, expert_length=512, layers=2),
    "ungated with a shared expert": replace(ZOO["nemotron_h_moe"], width=256, expert_length=512),
    "ungated with a latent projection": replace(
        ZOO["nemotron_h_moe-latent"], width=512, expert_length=512, latent_size=256
    ),
}
FORMATS: list[tuple[str, ...]] = [("Q4_0",), ("Q8_0",), ("Q4_K", "Q6_K"), ("Q5_K",)]


@contextmanager
def opened(model: RandomModel, folder: Path) -> Iterator[tuple[DecoderSpec, DecoderWeights]]:
    with GGUFFile.open(model.write(folder / f"{model.architecture}.gguf")) as file:
        config = read_config(file)
        yield config.specification(), read_weights(file, config)


def sparse_layers(spec: DecoderSpec) -> SparseLayers:
    """All layers with experts."""
    indices = [sparse_index(spec, layer) for layer in range(len(spec.layers))]
    found = [index for index in indices if index and isinstance(spec.residual(index).block, MoeSpec)]
    return dict.fromkeys(index.layer for index in found)


def experts_of(
    spec: DecoderSpec,
    weights: DecoderWeights,
    x: Rows,
    sparse: SparseLayers,
    threads: int = 2,
    isa: str = BEST,
) -> Rows:
    """x after the MoE blocks of all layers."""
    kernels = built_kernels(isa, kernel_units(weights, sparse=sparse))
    state = DecoderState.allocate(spec, 32, "f32")
    backend = CpuBackend(spec, weights, state, kernels, CpuOptions(32, threads, sparse=sparse))
    rows = backend.embed([0] * len(x))
    rows[:] = x
    for layer in sparse_layers(spec):
        index = sparse_index(spec, layer)
        assert index is not None
        for call in backend.decoder.calls[index]:
            assert call.kernel.startswith("sparse_") == bool(sparse)
        if spec.residual(index).block.pre_attention_router:
            assert index.position == 1
            backend.run_block(index._replace(position=0), rows, 0)
        backend.run_block(index, rows, 0)
    result = rows.copy()
    backend.close()
    return result


def inputs(tokens: int, width: int) -> Rows:
    return np.random.default_rng(5).standard_normal((tokens, width)).astype(np.float32)


@pytest.mark.default_cases
@pytest.mark.parametrize(("isa", "formats"), isas_and_formats([BEST, PORTABLE], FORMATS))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 3, SPARSE_TOKENS, SPARSE_TOKENS + 3])
def test_sparse_experts_equal_the_dense_ones(
    tmp_path: Path, isa: str, formats: tuple[str, ...], name: str, tokens: int
) -> None:
    with opened(replace(MODELS[name], formats=formats), tmp_path) as (spec, weights):
        sparse, x = sparse_layers(spec), inputs(tokens, spec.hidden_size)
        assert {why_dense(spec, weights, layer) for layer in sparse} == {None}
        dense = experts_of(spec, weights, x, {}, isa=isa)
        actual = experts_of(spec, weights, x, sparse, isa=isa)
    if "ungated" in name:
        assert np.array_equal(actual, dense)
    else:
        assert np.linalg.norm(actual - dense) < 2e-6 * np.linalg.norm(dense)
    assert not np.array_equal(dense, x)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads_gives_the_same_sparse_experts(tmp_path: Path, threads: int) -> None:
    with opened(replace(MODELS["gated"], formats=("Q4_0",)), tmp_path) as (spec, weights):
        x, sparse = inputs(3, spec.hidden_size), sparse_layers(spec)
        one, others = (experts_of(spec, weights, x, sparse, threads=count) for count in (2, threads))
    assert np.array_equal(one, others)


def test_whole_logits_of_sparse_experts_equal_the_dense_ones(tmp_path: Path) -> None:
    model = replace(MODELS["gated"], formats=("Q8_0",))
    with opened(model, tmp_path) as (spec, weights):
        sparse = sparse_layers(spec)
        assert [why_dense(spec, weights, layer) for layer in sparse] == [None] * 2
        found = []
        for layers in (sparse, {}):
            kernels = built_kernels(BEST, kernel_units(weights, sparse=layers))
            state = DecoderState.allocate(spec, 32, "f32")
            backend = CpuBackend(spec, weights, state, kernels, CpuOptions(32, 2, sparse=layers))
            ids = [5, 3, 200, 17, 99, 4, 8, 150]
            for first, last in ((0, 6), (6, 7), (7, 8)):
                x = backend.embed(ids[first:last])
                backend.forward(x, first)
            found.append(backend.logits(x).copy())
            backend.close()
    assert np.linalg.norm(found[0] - found[1]) < 0.02 * np.linalg.norm(found[1])


def test_weights_of_inactive_neurons_of_experts_have_no_effect(tmp_path: Path) -> None:
    """Rows of up and columns of down whose gate is never positive may have any value."""
    with opened(replace(MODELS["gated"], formats=("Q8_0",)), tmp_path) as (spec, weights):
        index = sparse_index(spec, 0)
        assert index is not None
        block = sparse_block(weights, 0)
        assert isinstance(block, MoeWeights)
        assert block.ffn_gate_exps is not None
        bias = np.zeros(block.ffn_up_exps.experts * block.ffn_up_exps.rows, np.float32)
        bias[1::2] = -1e6
        up = block.ffn_up_exps.raw.copy()
        up[1::2] ^= 85
        blocks = [
            replace(block, ffn_gate_exps_bias=bias, ffn_up_exps=replace(block.ffn_up_exps, raw=raw))
            for raw in (block.ffn_up_exps.raw, up)
        ]
        x = inputs(2, spec.hidden_size)
        results = []
        for each in blocks:
            layer = weights.layers[0]
            position = index.position
            changed = list(layer.blocks)
            changed[position] = changed[position].with_block(each)
            first = replace(layer, blocks=tuple(changed))
            one = replace(weights, layers=(first, *weights.layers[1:]))
            results.append(experts_of(spec, one, x, sparse_layers(spec)))
    assert np.array_equal(results[0], results[1])


def test_the_reason_is_given_why_experts_cannot_be_sparse(tmp_path: Path) -> None:
    narrow = replace(ZOO["smallthinker"], formats=("Q8_0",))
    silu = replace(ZOO["qwen3moe"], width=128, formats=("Q8_0",))
    for model, reason in ((narrow, "wanted a multiple of 32 x 128"), (silu, "its activation is silu")):
        with opened(model, tmp_path) as (spec, weights):
            assert reason in (why_dense(spec, weights, 0) or "")
