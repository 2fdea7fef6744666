"""MoE layers on the CPU against the numpy reference: blocks on the same rows, whole models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks.feed_forward import CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_SLOPE
from edgeinfer_kernels.blocks.moe import MIN_WEIGHT_SUM, Gating, MoeSpec
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.runtime import abi
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.decoder_state import NO_EXPERTS, DecoderState, Routing
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_kernels.reference.blocks.moe import route
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.conftest import (
    BEST,
    PORTABLE,
    TILE_ISAS,
    best_formats,
    built_kernels,
    isas_and_formats,
)
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

BATCH = 128
MOE_MODELS = [name for name, model in ZOO.items() if model.experts]
WIDE = RandomModel("qwen2moe", 256, 2, 8, 4, 32, 512, experts=9, experts_per_token=4, expert_length=256,
                   shared_length=256, biases=("attn_q", "attn_k", "attn_v"))  # fmt: skip
FORMATS = (
    *(("F16",), ("BF16", "Q8_0"), ("MXFP4",), ("Q4_K", "Q6_K"), ("Q4_0", "Q5_1", "IQ4_NL")),
    *(("Q5_K", "Q3_K", "IQ4_XS"), ("TQ1_0", "Q2_K"), ("F32", "Q8_0", "Q4_K")),
)
Rows = npt.NDArray[np.floating]


@contextmanager
def both_backends(
    path: Path, isa: str = BEST, threads: int = 2, repack: bool = True
) -> Iterator[tuple[CpuBackend, ReferenceBackend]]:
    """The model's backend and its reference, each with a buffer for the routing."""
    with GGUFFile.open(path) as file:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        kernels = built_kernels(isa, kernel_units(weights))
        states = [DecoderState.allocate(spec, 2 * BATCH, "f32") for _ in range(2)]
        backend = CpuBackend(
            spec,
            weights,
            states[0],
            kernels,
            CpuOptions(BATCH, threads, [] if repack else weights.matrices()),
            routing=Routing.allocate(spec, BATCH),
        )
        exact = ReferenceBackend(spec, weights, states[1], np.float64, Routing.allocate(spec, BATCH))
        try:
            yield backend, exact
        finally:
            backend.close()


def rows(tokens: int, width: int, seed: int = 3) -> Rows:
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def block_of(backend: CpuBackend | ReferenceBackend, x: Rows, layer: int = 0, attention: bool = True) -> Rows:
    """What a layer's blocks, or its last one, add to the rows, which start from position 0."""
    if isinstance(backend, CpuBackend):
        inside = backend.embed([0] * len(x))
        inside[:] = x
    else:
        inside = x.astype(backend.dtype)
    before = inside.copy()
    positions = range(len(backend.spec.layers[layer].blocks))
    for position in positions if attention else positions[-1:]:
        index = BlockIndex(layer, position)
        if isinstance(backend, CpuBackend):
            backend.run_block(index, inside, 0)
        else:
            backend.run_block(index, inside, 0, before)
    return np.asarray(inside - before)


def selected_experts(
    backend: CpuBackend | ReferenceBackend, tokens: int, layer: int = 0
) -> npt.NDArray[np.int64]:
    routing = backend.routing
    assert routing is not None
    return routing.ids[layer, :tokens].copy()


def relative(actual: Rows, expected: Rows) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.default_cases
@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
@pytest.mark.parametrize("name", MOE_MODELS)
def test_an_f32_moe_layer_equals_its_formula(tmp_path: Path, name: str, tokens: int) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    with both_backends(path) as (backend, exact):
        for layer in range(2):
            x = rows(tokens, ZOO[name].width, seed=layer)
            assert relative(block_of(backend, x, layer), block_of(exact, x, layer)) < 2e-6
            assert np.array_equal(
                selected_experts(backend, tokens, layer), selected_experts(exact, tokens, layer)
            )


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(("isa", "formats"), isas_and_formats([BEST, PORTABLE], FORMATS))
def test_experts_of_every_format_differ_by_the_rounding_of_activations_only(
    tmp_path: Path, formats: tuple[str, ...], isa: str
) -> None:
    path = replace(WIDE, formats=formats).write(tmp_path / "model.gguf")
    with both_backends(path, isa) as (backend, exact):
        for tokens in (1, 3, 17, 64):
            x = rows(tokens, WIDE.width)
            result = block_of(backend, x, attention=False)
            assert relative(result, block_of(exact, x, attention=False)) < 0.015
            assert np.array_equal(selected_experts(backend, tokens), selected_experts(exact, tokens))


@pytest.mark.parametrize("isa", TILE_ISAS)
@pytest.mark.parametrize("experts", [2, 5])
def test_experts_with_many_tokens_use_amx(tmp_path: Path, isa: str, experts: int) -> None:
    model = replace(WIDE, experts=experts, experts_per_token=2, formats=("Q4_K", "Q8_0"))
    path = model.write(tmp_path / "model.gguf")
    x = rows(117, WIDE.width)
    with both_backends(path, isa) as (backend, exact):
        expected = block_of(exact, x, attention=False)
        by_tiles = relative(block_of(backend, x, attention=False), expected)
    with both_backends(path, PORTABLE) as (backend, _):
        by_bytes = relative(block_of(backend, x, attention=False), expected)
    assert 0 < by_tiles < 0.8 * by_bytes


@pytest.mark.parametrize("formats", best_formats([("F32",), ("MXFP4", "F16"), ("Q4_K", "Q6_K", "TQ1_0")]))
def test_memory_mapped_experts_give_the_same_rows(tmp_path: Path, formats: tuple[str, ...]) -> None:
    path = replace(WIDE, formats=formats).write(tmp_path / "model.gguf")
    result = []
    for repack in (True, False):
        with both_backends(path, repack=repack) as (backend, _):
            result.append([block_of(backend, rows(tokens, WIDE.width)) for tokens in (1, 17)])
    for repacked, in_file in zip(*result, strict=True):
        assert np.array_equal(repacked, in_file)


@pytest.mark.parametrize("repack", [True, False])
def test_odd_sizes_and_counts_are_padded(tmp_path: Path, repack: bool) -> None:
    model = RandomModel("gpt-oss", 60, 2, 5, 1, 12, experts=3, experts_per_token=3, expert_length=37,
                        biases=ZOO["gpt-oss"].biases, extra={"attention.sliding_window": 6})  # fmt: skip
    path = model.write(tmp_path / "model.gguf")
    with both_backends(path, repack=repack) as (backend, exact):
        for tokens in (1, 5, 33):
            x = rows(tokens, 60)
            assert relative(block_of(backend, x), block_of(exact, x)) < 2e-6


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("threads", [1, 3, 7])
@pytest.mark.parametrize("used", [1, 4])
def test_any_number_of_threads_gives_the_same_rows(tmp_path: Path, threads: int, used: int) -> None:
    path = replace(WIDE, experts_per_token=used, formats=("Q8_0", "Q4_K")).write(tmp_path / "model.gguf")
    result = []
    for count in (threads, 2):
        with both_backends(path, threads=count) as (backend, _):
            result.append([block_of(backend, rows(tokens, WIDE.width)) for tokens in (1, 3, 64)])
    for one, other in zip(*result, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe", "gpt-oss"])
def test_all_layers_in_one_call_equal_block_by_block(tmp_path: Path, name: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    result = []
    for together in (True, False):
        with both_backends(path) as (backend, _):
            for start, ids in ((0, [5, 6, 7, 8, 9]), (5, [10])):
                x = backend.embed(ids)
                if together:
                    backend.forward(x, start)
                else:
                    for index in backend.spec.indices():
                        backend.run_block(index, x, start)
            result.append(x.copy())
    assert np.array_equal(result[0], result[1])


def test_leading_layers_may_be_dense_without_routing(tmp_path: Path) -> None:
    model = replace(ZOO["qwen3moe"], dense_layers=1)
    with both_backends(model.write(tmp_path / "model.gguf")) as (backend, exact):
        x = rows(4, model.width)
        for layer in range(2):
            assert relative(block_of(backend, x, layer), block_of(exact, x, layer)) < 2e-6
        assert (selected_experts(backend, BATCH, 0) == NO_EXPERTS).all()
        assert (selected_experts(backend, 4, 1) != NO_EXPERTS).all()
        assert (selected_experts(backend, BATCH, 1)[4:] == NO_EXPERTS).all()


def test_non_finite_hidden_states_select_valid_experts(tmp_path: Path) -> None:
    path = ZOO["olmoe"].write(tmp_path / "model.gguf")
    with both_backends(path) as (backend, _):
        assert np.isnan(block_of(backend, np.full((3, 64), np.nan, np.float32))).all()
        assert [sorted(ids) for ids in selected_experts(backend, 3).tolist()] == [[0, 1, 2, 3]] * 3
        assert np.isfinite(block_of(backend, rows(3, 64))).all()


@pytest.mark.parametrize(
    ("gating", "normalized", "expected"),
    [
        ("softmax", False, [0.5, 0.25]),
        ("softmax", True, [2 / 3, 1 / 3]),
        ("softmax_of_selected", False, [2 / 3, 1 / 3]),
        ("sigmoid", False, [0.8, 2 / 3]),
        ("sigmoid", True, [6 / 11, 5 / 11]),
    ],
)
def test_expert_weights_follow_the_gating_function(
    gating: Gating, normalized: bool, expected: list[float]
) -> None:
    scores = np.log(np.array([[1.0, 2.0, 4.0, 1.0]]))
    spec = MoeSpec("silu", 4, 2, 32, gating, normalized)
    selected, weights = route(scores, spec)
    assert selected.tolist() == [[2, 1]]
    assert np.allclose(weights, [expected])
    assert np.allclose(route(scores, replace(spec, scale=2.5))[1], 2.5 * np.array([expected]))


def test_experts_come_from_the_groups_with_the_best_pairs() -> None:
    weights = np.array([[0.9, 0.0, 0.1], [0.55, 0.6, 0.0], [0.5, 0.52, 0.4]])
    scores = np.log(weights + 1e-9) - np.log(1 - weights + 1e-9)
    spec = MoeSpec("silu", 9, 3, 32, "sigmoid", False, groups=3, groups_per_token=1)
    assert route(scores.reshape(1, 9), spec)[0].tolist() == [[4, 3, 5]]
    two = replace(spec, groups_per_token=2)
    selected, found = route(scores.reshape(1, 9), two)
    assert selected.tolist() == [[4, 3, 7]]
    assert np.allclose(found, [[0.6, 0.55, 0.52]])
    bias = np.zeros(9, np.float32)
    bias[2] = 0.3
    assert route(scores.reshape(1, 9), replace(spec, selection_bias=True), bias)[0].tolist() == [[0, 2, 1]]


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "used"), [(1, 1), (2, 1), (4, 2), (5, 5), (10, 3)])
def test_the_kernel_selects_as_the_formula(tmp_path: Path, gating: Gating, groups: int, used: int) -> None:
    extra = {
        "expert_gating_func": 1 + (gating == "sigmoid"),
        "expert_group_count": groups,
        "expert_group_used_count": used,
        "leading_dense_block_count": 0,
    }
    model = replace(ZOO["deepseek2-groups"], experts=20, experts_per_token=4, dense_layers=0, extra=extra)
    with both_backends(model.write(tmp_path / "model.gguf")) as (backend, exact):
        x = rows(BATCH, model.width)
        assert relative(block_of(backend, x), block_of(exact, x)) < 2e-6
        assert (selected_experts(backend, BATCH) == selected_experts(exact, BATCH)).all()


def test_equal_scores_select_the_lower_expert_and_tiny_sums_do_not_normalize() -> None:
    spec = MoeSpec("silu", 4, 2, 32, "sigmoid", normalized=True)
    selected, weights = route(np.full((1, 4), -30.0), spec)
    assert selected.tolist() == [[0, 1]]
    assert np.allclose(weights, 2.0**14 / (1 + np.exp(30.0)))


def test_kernels_and_formulas_have_the_same_constants() -> None:
    assert abi.CLAMPED_SWIGLU_SLOPE == CLAMPED_SWIGLU_SLOPE
    assert abi.CLAMPED_SWIGLU_LIMIT == CLAMPED_SWIGLU_LIMIT
    assert abi.MIN_WEIGHT_SUM == MIN_WEIGHT_SUM
