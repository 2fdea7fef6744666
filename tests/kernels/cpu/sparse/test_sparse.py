"""A sparse feed-forward block equals the dense one."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.runtime.abi import (
    SPARSE_TOKENS,
)
from edgeinfer_kernels.cpu.sparse import SparseLayers, dense_layer, why_dense, why_unbundled
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_kernels.reference import ReferenceBackend
from tests.kernels.conftest import BEST, PORTABLE, built_kernels, isas_and_formats
from tests.kernels.row_matrices import random_matrix

WIDTH, NEURONS = 512, 768
Rows = npt.NDArray[np.float32]


def with_feed_forward(weights: DecoderWeights, block: FeedForwardWeights) -> DecoderWeights:
    """The same decoder of one layer with another feed-forward."""
    attention, second = weights.layers[0].blocks
    return replace(weights, layers=(LayerWeights((attention, second.with_block(block))),))


def decoder(
    activation: Activation, gated: bool, formats: tuple[str, str, str], biases: bool = False, layers: int = 2
) -> tuple[DecoderSpec, DecoderWeights]:
    """A decoder whose feed-forward is of these formats (gate, up, down); a third of the neurons is active."""
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(4, 2, 32, 0.2, norm, None)
    blocks = (attention, FeedForwardSpec(activation, NEURONS, gated))
    one = LayerSpec(tuple(ResidualBlock(block, norm, "norm") for block in blocks))
    spec = DecoderSpec(WIDTH, 32, (one,) * layers, norm)
    random = np.random.default_rng(1)

    def matrix(name: str, rows: int, columns: int, seed: int) -> Matrix:
        return random_matrix(name, rows, columns, columns**-0.5, seed)

    def vector(count: int, mean: float, spread: float) -> Rows:
        return (mean + spread * random.standard_normal(count)).astype(np.float32)

    def layer(seed: int) -> LayerWeights:
        first = {"ffn_gate_bias" if gated else "ffn_up_bias": vector(NEURONS, -0.4, 0.1)}
        others = {"ffn_up_bias": vector(NEURONS, 0, 0.1), "ffn_down_bias": vector(WIDTH, 0, 0.1)}
        attention = AttentionWeights(
            matrix("Q8_0", 128, WIDTH, seed),
            matrix("Q8_0", 64, WIDTH, seed + 1),
            matrix("Q8_0", 64, WIDTH, seed + 2),
            matrix("Q8_0", WIDTH, 128, seed + 3),
        )
        norms = [vector(WIDTH, 1, 0.1) for _ in range(2)]
        chosen: dict[str, Any] = {**(others if biases else {}), **first}
        second = FeedForwardWeights(
            ffn_up=matrix(formats[1], NEURONS, WIDTH, seed + 4),
            ffn_down=matrix(formats[2], WIDTH, NEURONS, seed + 5),
            ffn_gate=matrix(formats[0], NEURONS, WIDTH, seed + 6) if gated else None,
            **chosen,
        )
        return LayerWeights((ResidualWeights(attention, norms[0]), ResidualWeights(second, norms[1])))

    embedding = matrix("Q8_0", 32, WIDTH, 99)
    weights = DecoderWeights(
        embedding, embedding, vector(WIDTH, 1, 0.1), None, tuple(layer(10 * i) for i in range(layers))
    )
    return spec, weights


def select_all(weights: DecoderWeights) -> NeuronPredictor:
    """A predictor that names every neuron."""
    neurons = dense_layer(weights, 0).ffn_up.rows
    return NeuronPredictor(
        random_matrix("Q8_0", 32, WIDTH),
        random_matrix("Q8_0", neurons, 32),
        np.full(neurons, 1e6, np.float32),
    )


def feed_forward(
    spec: DecoderSpec,
    weights: DecoderWeights,
    x: Rows,
    sparse: SparseLayers | None,
    threads: int = 2,
    isa: str = BEST,
) -> Rows:
    state = DecoderState.allocate(spec, 16, "f32")
    units = kernel_units(weights, sparse=sparse)
    kernels = built_kernels(isa, units)
    backend = CpuBackend(spec, weights, state, kernels, CpuOptions(32, threads, sparse=sparse or {}))
    rows = backend.embed([0] * len(x))
    rows[:] = x
    for index in range(len(spec.layers)):
        backend.run_block(BlockIndex(index, 1), rows, 0)
    result = rows.copy()
    backend.close()
    return result


def relative(actual: Rows, expected: npt.NDArray[np.floating]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def inputs(tokens: int) -> Rows:
    return np.random.default_rng(5).standard_normal((tokens, WIDTH)).astype(np.float32)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("isa", "formats"),
    isas_and_formats(
        [BEST, PORTABLE], [("Q4_0", "Q4_0", "Q4_0"), ("Q8_0", "Q4_K", "Q6_K"), ("Q6_K", "Q5_K", "Q5_K")]
    ),
)
@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize(("activation", "gated"), [("relu", True), ("relu_squared", False), ("drelu", True)])
def test_a_sparse_block_equals_the_dense_one(
    isa: str, predicted: bool, activation: Activation, gated: bool, formats: tuple[str, str, str]
) -> None:
    spec, weights = decoder(activation, gated, formats, biases=True)
    sparse = {index: select_all(weights) if predicted else None for index in range(2)}
    for tokens in (1, SPARSE_TOKENS):
        x = inputs(tokens)
        dense = feed_forward(spec, weights, x, None, isa=isa)
        actual = feed_forward(spec, weights, x, sparse, isa=isa)
        assert relative(actual, dense) < 1e-6
        exact = x.astype(np.float64)
        reference = ReferenceBackend(spec, weights, DecoderState(), np.float64)
        for index in range(2):
            reference.run_block(BlockIndex(index, 1), exact, 0)
        assert relative(actual, exact) < 1.1 * relative(dense, exact) < 0.02


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_sparse_block_within_rounding(threads: int) -> None:
    spec, weights = decoder("relu", True, ("Q8_0", "Q8_0", "Q4_0"))
    counts = (1, threads, threads)
    result = [feed_forward(spec, weights, inputs(1), {0: None, 1: None}, threads=count) for count in counts]
    np.testing.assert_allclose(result[1], result[0], rtol=0, atol=0.02 * np.abs(result[0]).max())
    assert np.array_equal(result[1], result[2])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_without_a_gate_the_sparse_block_is_the_dense_one_bit_by_bit(threads: int) -> None:
    spec, weights = decoder("relu_squared", False, ("Q8_0", "Q8_0", "Q4_0"))
    result = [
        feed_forward(spec, weights, inputs(1), sparse, threads) for sparse in (None, {0: None, 1: None})
    ]
    assert np.array_equal(result[0], result[1])


def test_a_token_has_the_same_result_alone_and_with_others() -> None:
    spec, weights = decoder("relu", True, ("Q8_0", "Q8_0", "Q4_0"))
    rows, sparse = inputs(4), {0: None, 1: None}
    together = feed_forward(spec, weights, rows, sparse, threads=3)
    alone = [feed_forward(spec, weights, rows[token : token + 1], sparse, threads=3) for token in range(4)]
    assert np.array_equal(together, np.concatenate(alone))


def test_steps_of_many_tokens_use_the_dense_block_and_layers_may_differ() -> None:
    spec, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"))
    x = inputs(SPARSE_TOKENS + 1)
    assert np.array_equal(feed_forward(spec, weights, x, {1: None}), feed_forward(spec, weights, x, None))
    assert (
        relative(feed_forward(spec, weights, x[:1], {1: None}), feed_forward(spec, weights, x[:1], None))
        < 1e-6
    )


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_a_norm_of_the_neurons_is_that_of_the_active_ones(gated: bool, predicted: bool) -> None:
    spec, weights = decoder("relu_squared", gated, ("Q8_0", "Q4_0", "Q4_0"), layers=1)
    attention, second = spec.layers[0].blocks
    normed = replace(second.block, sub_norm=NormSpec("rms", 1e-5))
    spec = replace(spec, layers=(LayerSpec((attention, replace(second, block=normed))),))
    w = dense_layer(weights, 0)
    scales: dict[str, Any] = {"gate_scale": 0.7, "up_scale": 1.3} if gated else {"up_scale": 0.7}
    weight = np.random.default_rng(4).uniform(0.5, 1.5, NEURONS).astype(np.float32)
    block = replace(w, ffn_gate_bias=None, ffn_up_bias=None, sub_norm=SubNorm(weight), **scales)
    weights = with_feed_forward(weights, block)
    sparse = {0: select_all(weights) if predicted else None}
    for tokens in (1, 3):
        dense = feed_forward(spec, weights, inputs(tokens), None)
        assert relative(feed_forward(spec, weights, inputs(tokens), sparse), dense) < 1e-6
    assert why_unbundled(spec, weights, 0) == "a norm of its neurons needs all of them at once"


def test_neurons_missed_by_the_predictor_are_omitted() -> None:
    spec, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"), layers=1)
    every, x = select_all(weights), inputs(1)
    none_active = replace(every, bias=np.full(NEURONS, -1e6, np.float32))
    assert np.array_equal(feed_forward(spec, weights, x, {0: none_active}), x)
    even_neurons = replace(every, bias=np.where(np.arange(NEURONS) % 2, -1e6, 1e6).astype(np.float32))
    w = dense_layer(weights, 0)
    assert w.ffn_gate_bias is not None
    off = np.where(np.arange(NEURONS) % 2, -1e6, w.ffn_gate_bias).astype(np.float32)
    others = with_feed_forward(weights, replace(w, ffn_gate_bias=off))
    expected = feed_forward(spec, others, x, None)
    assert relative(feed_forward(spec, weights, x, {0: even_neurons}), expected) < 1e-6


def test_layers_that_cannot_be_sparse_report_the_reason() -> None:
    spec, weights = decoder("relu", True, ("Q4_0", "Q4_0", "Q4_0"), layers=1)
    w = dense_layer(weights, 0)
    assert why_dense(spec, weights, 0) is None
    silu = decoder("silu", True, ("Q4_0", "Q4_0", "Q4_0"), layers=1)
    reason = why_dense(*silu, 0)
    assert reason == "its activation is silu, which is never exactly zero"
    reason = why_dense(
        spec, with_feed_forward(weights, replace(w, ffn_down=random_matrix("F16", WIDTH, NEURONS))), 0
    )
    assert reason == "F16.weight is F16; sparse are Q4_0, Q8_0, Q4_K, Q5_K, Q6_K"
    narrow = FeedForwardWeights(random_matrix("Q4_0", 33, 64), random_matrix("Q4_0", 64, 64))
    reason = why_dense(spec, with_feed_forward(weights, narrow), 0)
    assert reason == "Q4_0.weight isn't a multiple of 32 in both its sizes"
