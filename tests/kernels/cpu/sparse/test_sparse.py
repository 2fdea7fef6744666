"""A sparse feed-forward equals the dense one for every format, and reads no inactive neuron."""

from ctypes import addressof
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units, sparse_units
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    NEURON_FORMATS,
    ColumnLayout,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
    row_groups,
)
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_BYTES,
    NEURONS_PER_BLOCK,
    ROWS_AHEAD,
    SPARSE_TOKENS,
    SUMS_SCRATCH,
    lane_activations_bytes,
)
from edgeinfer_kernels.cpu.runtime.block_args import NeuronColumnsArgs
from edgeinfer_kernels.cpu.runtime.structure import field_types
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
from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.reference import ReferenceBackend
from tests.kernels.conftest import BEST, ISA_NAMES, PORTABLE, best_formats, built_kernels, isas_and_formats
from tests.kernels.row_matrices import quantized_rows, random_matrix

WIDTH, NEURONS = 512, 768
Rows = npt.NDArray[np.float32]


@cache
def sparse_kernels(isa: str, name: str) -> Kernels:
    return built_kernels(isa, sparse_units([name]))


def by_lanes(quantized: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.uint32]:
    """A token's blocks of activations, sixteen interleaved by words; zeros after the last."""
    words = np.zeros((-(-blocks // 16) * 16, ACTIVATION_BYTES // 4), np.uint32)
    words[:blocks] = quantized.view(np.uint32).reshape(blocks, -1)
    return np.ascontiguousarray(words.reshape(-1, 16, ACTIVATION_BYTES // 4).swapaxes(1, 2))


def neuron_rows(
    kernels: Kernels, matrix: Matrix, quantized: npt.NDArray[np.uint8], expected: list[int]
) -> Rows:
    """The products of the requested rows, NaN elsewhere."""
    laid_out, lanes = lay_out_rows(matrix, kernels), by_lanes(quantized, matrix.columns // 32)
    assert lanes.nbytes == lane_activations_bytes(matrix.columns)
    assert laid_out.nbytes - 4096 == matrix.rows * neuron_row_bytes(matrix)
    neurons, out = (
        np.array([*expected, *[0] * ROWS_AHEAD], np.int32),
        np.full(matrix.rows, np.nan, np.float32),
    )
    kernels.function(f"neuron_rows_{matrix.format}", 10)(
        address(laid_out),
        row_groups(matrix.columns),
        neuron_row_bytes(matrix),
        0,
        address(neurons),
        len(expected),
        address(lanes),
        address(out),
        address(laid_out),
        neuron_row_bytes(matrix),
    )
    return out


def neuron_sums(
    kernels: Kernels,
    matrix: Matrix,
    quantized: npt.NDArray[np.uint8],
    part: tuple[int, int] = (0, 1),
    by_outputs: int = 0,
    laid_out: npt.NDArray[np.uint8] | None = None,
) -> Rows:
    """matrix · x by neurons, (tokens, outputs); of one of some parts of the neurons."""
    layout = ColumnLayout.of(matrix)
    laid_out = lay_out_columns(matrix) if laid_out is None else laid_out
    assert laid_out.nbytes - 4096 == layout.nbytes
    names = [name for name in field_types(NeuronColumnsArgs) if hasattr(layout, name)]
    columns = NeuronColumnsArgs(weights=address(laid_out), **{name: getattr(layout, name) for name in names})
    blocks = quantized[:, : layout.blocks * ACTIVATION_BYTES].reshape(len(quantized), -1, ACTIVATION_BYTES)
    counts = np.count_nonzero(blocks[:, :, :NEURONS_PER_BLOCK], axis=2).astype(np.uint8)
    columns.counts, columns.counts_stride = address(counts), counts.strides[0]
    out, scratch = (
        np.full((len(quantized), layout.outputs), np.nan, np.float32),
        allocate(SUMS_SCRATCH + 4 * layout.blocks * len(quantized)),
    )
    kernels.function(f"neuron_sums_{matrix.format}", 10)(
        addressof(columns),
        *part,
        address(quantized),
        quantized.strides[0],
        len(quantized),
        address(out),
        out.strides[0],
        address(scratch),
        by_outputs,
    )
    return out[:, : matrix.rows]


@pytest.mark.default_cases
@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, list(NEURON_FORMATS)))
@pytest.mark.parametrize("columns", [256, 512, 1280])
def test_single_rows_equal_the_reference_matmul(isa: str, name: str, columns: int) -> None:
    matrix = random_matrix(name, 63, columns)
    x = np.random.default_rng(2).standard_normal((1, columns)).astype(np.float32)
    quantized, exact = quantized_rows(x)
    requested = [62, 0, 17, 33, 34]
    actual = neuron_rows(sparse_kernels(isa, name), matrix, quantized[0], requested)
    expected = (exact @ matrix.decoded().astype(np.float64).T)[0]
    np.testing.assert_allclose(
        actual[requested], expected[requested], rtol=0, atol=2e-5 * np.abs(expected).max()
    )
    assert np.isnan(np.delete(actual, requested)).all()


@pytest.mark.default_cases
@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, list(NEURON_FORMATS)))
@pytest.mark.parametrize(("outputs", "tokens", "active"), [(111, 1, 0.2), (256, 3, 0.5), (128, 2, 1.0)])
def test_sums_of_active_neurons_equal_the_reference_matmul(
    isa: str, name: str, outputs: int, tokens: int, active: float
) -> None:
    random = np.random.default_rng(3)
    matrix = random_matrix(name, outputs, 512)
    x = random.standard_normal((tokens, 512)).astype(np.float32)
    x[random.random(x.shape) >= active] = 0
    x[:, 64:128] = 0  # blocks without any active neuron
    quantized, exact = quantized_rows(x)
    expected = exact @ matrix.decoded().astype(np.float64).T
    actual = neuron_sums(sparse_kernels(isa, name), matrix, quantized)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_the_outputs_are_those_of_all_bit_by_bit(parts: int) -> None:
    matrix, kernels = random_matrix("Q4_0", 256, 512), sparse_kernels(BEST, "Q4_0")
    x = quantized_rows(np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32))[0]
    sums = [neuron_sums(kernels, matrix, x, (part, parts), by_outputs=1) for part in range(parts)]
    assert (np.sum(np.isfinite(sums), axis=0) == 1).all()
    assert np.array_equal(np.nansum(sums, axis=0), neuron_sums(kernels, matrix, x))


@pytest.mark.parametrize("parts", [2, 5, 16, 19])
@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_the_sums_of_the_parts_of_the_neurons_are_those_of_all(name: str, parts: int) -> None:
    matrix, kernels = random_matrix(name, 256, 512), sparse_kernels(BEST, name)
    x = quantized_rows(np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32))[0]
    sums = [neuron_sums(kernels, matrix, x, (part, parts)) for part in range(parts)]
    assert sum(not each.any() for each in sums) == max(0, parts - 16)
    np.testing.assert_allclose(np.sum(sums, 0), neuron_sums(kernels, matrix, x), rtol=0, atol=1e-4)


def test_the_part_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    matrix, kernels = random_matrix("Q4_0", 256, 1024), sparse_kernels(BEST, "Q4_0")
    random = np.random.default_rng(4)
    x = random.standard_normal((3, 1024)).astype(np.float32)
    x[random.random(x.shape) > 0.1 * np.arange(1, 4)[:, None]] = 0
    quantized = quantized_rows(x)[0]
    for part in range(5):
        together = neuron_sums(kernels, matrix, quantized, (part, 5))
        alone = [neuron_sums(kernels, matrix, each[None], (part, 5))[0] for each in quantized]
        assert np.array_equal(together, alone)


@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_both_layouts_hold_the_values_of_the_file_bit_by_bit(name: str) -> None:
    """One neuron with the activation 1 returns its column; one column with it, that of all rows."""
    random = np.random.default_rng(7)
    kernels = sparse_kernels(BEST, name)
    matrix = random_matrix(name, 128, 512)
    weights = matrix.decoded()
    one = np.zeros((1, 512 // 32, ACTIVATION_BYTES), np.uint8)
    exact = name != "Q6_K"  # a product has 25 bits before the offset is subtracted
    for column in random.choice(512, 12, replace=False):
        block, index = divmod(int(column), 32)
        one[:] = 0
        one[0, block, index] = 1
        one[0, block, 32:].view(np.float32)[:] = (1, 1, index < 16, index >= 16)
        for actual in (
            neuron_sums(kernels, matrix, one.reshape(1, -1))[0],
            neuron_rows(kernels, matrix, one.reshape(-1), list(range(128))),
        ):
            if exact:
                assert np.array_equal(actual, weights[:, column])
            else:
                np.testing.assert_allclose(actual, weights[:, column], rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_weights_of_inactive_neurons_have_no_effect(name: str) -> None:
    kernels, matrix = sparse_kernels(BEST, name), random_matrix(name, 128, 256)
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    x[:, ::2] = 0
    quantized, layout = quantized_rows(x)[0], ColumnLayout.of(matrix)
    laid_out = lay_out_columns(matrix)
    expected = neuron_sums(kernels, matrix, quantized, laid_out=laid_out)
    super_blocks = laid_out[: layout.nbytes].reshape(-1, layout.super_bytes)[:, layout.super_factor_bytes :]
    shape = (-1, layout.blocks_per_super, layout.block_bytes)
    blocks = super_blocks.reshape(shape)[:, :, layout.factor_bytes :]
    neurons = blocks.reshape(*blocks.shape[:2], 32, layout.neuron_bytes)
    neurons[:, :, ::2] ^= 255
    assert np.array_equal(expected, neuron_sums(kernels, matrix, quantized, laid_out=laid_out))
    neurons[:, :, 1] ^= 255
    assert not np.array_equal(expected, neuron_sums(kernels, matrix, quantized, laid_out=laid_out))


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


@pytest.mark.default_cases
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
