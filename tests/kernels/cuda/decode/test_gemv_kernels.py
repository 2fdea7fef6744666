"""Products of packed rows with quantized activations, against float64 products of the decoded weights."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cuda.decode.gemv_kernels import gated_kernel, residual_kernel, rows_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    GatedConfig,
    GemvConfig,
    InputArgs,
    NormArgs,
    NormConfig,
    RowSplitArgs,
    SourceConfig,
    SumSquares,
    WordsConfig,
)
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import add_norm_kernel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, TILES
from edgeinfer_quant_formats import block_format, decode
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.device_matrices import (
    PLANES,
    activation_planes,
    block_order,
    device_matrix,
    normal_rows,
    quantized,
    random_bits,
    relative,
    values_read,
)

EXACT = 2e-6
HALVES = 2e-3
"""With weights and activations in float16."""
TENSOR = [name for name, tile in TILES.items() if tile.code not in FLOAT_CODES]
"""The types whose products can use tensor cores."""


def columns_for(name: str) -> int:
    """33 blocks of 32, or 3 of 256: both are padded, to 48 and 32."""
    return 768 if block_format(name).block_elements > 32 else 1056


def activations(device: str, tokens: int, columns: int) -> tuple[Any, Any]:
    """Values of very different sizes, many zeros among them; and the same as the device has them."""
    random = np.random.default_rng(columns)
    sizes = 10.0 ** random.integers(-3, 2, (tokens, columns // 16)).repeat(16, 1)
    x = random.standard_normal((tokens, columns)) * sizes
    x[-1, : columns // 2] = 0
    x = x.astype(np.float32)
    return x, torch.from_numpy(activation_planes(x)).to(device)


def multiply(
    first: DeviceMatrix,
    second: DeviceMatrix,
    planes: Any,
    step: int,
    bias: Any = None,
    vector: int = 1,
    groups: int = 1,
    warps: int = 0,
    unrolled: int = 0,
) -> Any:
    """(tokens, padded rows of both) by `rows_kernel`; with warps: on tensor cores."""
    tokens, device = len(planes), planes.device
    programs = [matrix.shapes.padded_rows // (16 * groups) for matrix in (first, second)]
    y = torch.full((tokens, 16 * groups * sum(programs)), float("nan"), device=device)
    nothing = torch.zeros(1, device=device)
    rows_kernel[(sum(programs),)](
        first.parts,
        second.parts,
        planes,
        y,
        nothing if bias is None else bias,
        SumSquares(nothing, 0.0),
        y.shape[1],
        FIRST_PROGRAMS=programs[0],
        FIRST=first.shapes.tile,
        SECOND=second.shapes.tile,
        BIAS=bias is not None,
        SOURCE=SourceConfig(planes.shape[2], planes.shape[1], norm=0, programs=1, width=1),
        GEMV=GemvConfig(step, vector, tokens, groups, warps, unrolled),
        DEPENDENT=False,
        num_warps=warps or 4,
    )
    return y.cpu().numpy().astype(np.float64)


def weights(name: str, raw: Any) -> Any:
    return decode(raw.reshape(-1), name).reshape(len(raw), -1).astype(np.float64)


@pytest.mark.parametrize(
    ("tokens", "step", "unrolled"),
    [
        (3, 64, 0),
        (2, 16, 1),
        pytest.param(1, 16, 0, marks=pytest.mark.slow),
        pytest.param(8, 8, 0, marks=pytest.mark.slow),
        pytest.param(8, 32, 1, marks=pytest.mark.slow),
        pytest.param(3, 8, 2, marks=pytest.mark.slow),
        pytest.param(3, 8, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TILES)
def test_rows_times_activations_equal_the_decoded_weights(
    device: str, name: str, tokens: int, step: int, unrolled: int
) -> None:
    columns = columns_for(name)
    normal, bits = normal_rows(name, 2, columns), random_bits(name, 6, columns)
    x, planes = activations(device, tokens, columns)
    first, second = (device_matrix(device, name, raw, columns) for raw in (normal, bits))
    actual, expected = multiply(first, second, planes, step, unrolled=unrolled), values_read(name, x)
    assert relative(actual[:, :2], expected @ weights(name, normal).T) < EXACT
    assert relative(actual[:, 16:22], expected @ weights(name, bits).T) < EXACT


@pytest.mark.parametrize(
    ("tokens", "vector", "groups", "warps", "unrolled"),
    [
        (13, 4, 2, 2, 0),
        pytest.param(5, 1, 1, 4, 1, marks=pytest.mark.slow),
        pytest.param(8, 1, 1, 1, 1, marks=pytest.mark.slow),
        pytest.param(16, 2, 4, 8, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TENSOR)
def test_rows_on_tensor_cores_equal_the_decoded_weights(
    device: str, name: str, tokens: int, vector: int, groups: int, warps: int, unrolled: int
) -> None:
    """Activations of very different sizes in a row, and rows of zeros: none overflows in float16."""
    columns, rows = columns_for(name), 16 * groups
    top, bottom = normal_rows(name, rows, columns), normal_rows(name, rows, columns, 1)
    x, _ = activations(device, tokens, columns)
    x[0] *= 1e6
    x[1] = 0
    planes = torch.from_numpy(activation_planes(x)).to(device)
    first, second = (device_matrix(device, name, raw, columns) for raw in (top, bottom))
    bias = torch.arange(2 * rows, dtype=torch.float32, device=device)
    actual = multiply(first, second, planes, 0, bias, vector, groups, warps, unrolled) - np.arange(2 * rows)
    expected = values_read(name, x) @ np.concatenate([weights(name, raw) for raw in (top, bottom)]).T
    for token in range(tokens):
        assert relative(actual[token], expected[token]) < HALVES, token


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "BF16"])
def test_a_token_has_the_same_bits_in_any_batch(device: str, name: str) -> None:
    raw = normal_rows(name, 16, 6144)
    matrix = device_matrix(device, name, raw, 6144)
    _, planes = activations(device, 8, 6144)
    for unrolled in (0, 1):
        together = multiply(matrix, matrix, planes, 32, unrolled=unrolled)
        for first, last in ((0, 2), (3, 6)):
            some = multiply(matrix, matrix, planes[first:last], 32, unrolled=unrolled)
            np.testing.assert_array_equal(some, together[first:last])


def add_products(matrix: DeviceMatrix, planes: Any, x: Any, gemv: GemvConfig) -> tuple[Any, Any]:
    """x (tokens, rows) + half of the products by `residual_kernel`, and the number of programs that it counts
    as arrived afterwards.
    """
    device, groups = planes.device, matrix.shapes.padded_rows // 16
    total = torch.tensor(x, device=device)
    sums = torch.full((len(x), groups), float("nan"), device=device)
    parts = torch.full((groups * gemv.splits * gemv.columns * 16,), float("nan"), device=device)
    arrived = torch.zeros(groups, dtype=torch.int32, device=device)
    out = torch.zeros((len(x), PLANES, 16), dtype=torch.int32, device=device)
    nothing = torch.zeros(1, device=device)
    residual_kernel[(groups, gemv.splits)](
        matrix.parts, planes, total, nothing, 0.5, InputArgs(out, nothing, sums),
        RowSplitArgs(parts, arrived),
        WIDTH=x.shape[1], READ=WordsConfig(planes.shape[2], planes.shape[1]), OUT=WordsConfig(16, PLANES),
        GEMV=gemv, TILE=matrix.shapes.tile, BIAS=False, GAIN=False, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    total = total.cpu().numpy()
    np.testing.assert_allclose(
        sums.cpu().numpy().sum(axis=1), np.square(total.astype(np.float64)).sum(axis=1), rtol=1e-5
    )
    floats = out.cpu().numpy()[:, 12:, block_order(512)[0]].view(np.float32)
    np.testing.assert_array_equal(floats, total[:, :32])
    return total, arrived.cpu().numpy()


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("splits", [2, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "NVFP4", "F16"])
def test_programs_that_share_rows_add_their_sums(device: str, name: str, splits: int) -> None:
    """In a fixed order: a token has the same bits in any batch. The step size does not divide the share."""
    rows, columns, tokens = 32, 1536, 5
    raw = normal_rows(name, rows, columns)
    matrix = device_matrix(device, name, raw, columns)
    values, planes = activations(device, tokens, columns)
    before = np.random.default_rng(1).standard_normal((tokens, rows)).astype(np.float32)
    for unrolled in (0, 1):
        gemv = GemvConfig(4, 1, tokens, unrolled=unrolled, splits=splits)
        actual, arrived = add_products(matrix, planes, before, gemv)
        assert not arrived.any()
        expected = before + 0.5 * (values_read(name, values) @ weights(name, raw).T)
        assert relative(actual, expected) < EXACT
        some, _ = add_products(matrix, planes[1:4], before[1:4], gemv._replace(tokens=3))
        np.testing.assert_array_equal(some, actual[1:4])


@pytest.mark.parametrize("name", ["Q5_0", "Q6_K", "BF16"])
def test_the_step_size_need_not_divide_the_row(device: str, name: str) -> None:
    columns = columns_for(name)
    raw = random_bits(name, 4, columns)
    x, planes = activations(device, 2, columns)
    matrix = device_matrix(device, name, raw, columns)
    for step in (8, 32):
        actual = multiply(matrix, matrix, planes, step)
        assert relative(actual[:, :4], values_read(name, x) @ weights(name, raw).T) < EXACT, step


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "IQ4_XS", "MXFP4"])
def test_zeros_and_extreme_scales_are_exact(device: str, name: str) -> None:
    columns, scales = columns_for(name), np.array([0, 6e-8, -65504, 65504, 6.1e-5], np.float16)
    raw = random_bits(name, 4, columns, scales)
    raw[3] = 0
    x, planes = activations(device, 1, columns)
    matrix = device_matrix(device, name, raw, columns)
    actual = multiply(matrix, matrix, planes, 32)
    expected = values_read(name, x) @ weights(name, raw).T
    assert relative(actual[:, :3], expected[:, :3]) < EXACT
    np.testing.assert_allclose(actual[:, 3], expected[:, 3], atol=1e-30)


def test_two_formats_and_a_bias_in_one_launch(device: str) -> None:
    top, bottom = normal_rows("Q8_0", 16, 96), normal_rows("F16", 18, 96)
    x, planes = activations(device, 2, 96)
    bias = torch.arange(48, dtype=torch.float32, device=device)
    actual = multiply(
        device_matrix(device, "Q8_0", top, 96), device_matrix(device, "F16", bottom, 96), planes, 16, bias
    )
    assert relative(actual[:, :16], values_read("Q8_0", x) @ weights("Q8_0", top).T + np.arange(16)) < EXACT
    expected = values_read("F16", x) @ weights("F16", bottom).T + np.arange(16, 34)
    assert relative(actual[:, 16:34], expected) < EXACT


@pytest.mark.parametrize(
    ("tokens", "step", "unrolled", "names"),
    [
        (1, 16, 0, ("Q4_K", "Q6_K")),
        (2, 32, 0, ("Q8_0", "F32")),
        (3, 8, 0, ("BF16", "Q8_0")),
        (4, 8, 1, ("BF16", "Q8_0")),
        (4, 4, 2, ("Q4_0", "Q6_K")),
        (6, 16, 1, ("Q4_K", "Q6_K")),
        (11, 0, 0, ("Q4_K", "Q6_K")),
    ],
)
def test_gate_and_up_are_multiplied_in_one_launch(
    device: str, names: tuple[str, str], tokens: int, step: int, unrolled: int
) -> None:
    """A step of 0: on tensor cores."""
    columns, groups, warps = 768, 1 if step else 2, 0 if step else 4
    raws = [normal_rows(name, 32, columns, seed) for seed, name in enumerate(names)]
    gate, up = (device_matrix(device, name, raw, columns) for name, raw in zip(names, raws, strict=True))
    x, planes = activations(device, tokens, columns)
    hidden = torch.zeros((tokens, PLANES, 16), dtype=torch.int32, device=device)
    sum_squares = torch.arange(1, 1 + 2 * tokens, dtype=torch.float32, device=device).view(tokens, 2)
    nothing = torch.zeros(1, device=device)
    gated_kernel[(2 // groups,)](
        gate.parts, up.parts, planes, hidden, nothing, nothing, SumSquares(sum_squares, 0.5),
        HIDDEN=WordsConfig(16, PLANES),
        GATED=GatedConfig(gate.shapes.tile, up.shapes.tile, has_gate=True, has_bias=False, activation=0),
        SOURCE=SourceConfig(planes.shape[2], PLANES, norm=1, programs=2, width=4),
        GEMV=GemvConfig(step, 2, tokens, groups, warps, unrolled), DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    inverse = 1 / np.sqrt(sum_squares.cpu().numpy().astype(np.float64).sum(1, keepdims=True) / 4 + 0.5)
    g, u = (
        values_read(name, x) @ weights(name, raw).T * inverse for name, raw in zip(names, raws, strict=True)
    )
    floats = hidden.cpu().numpy()[:, 12:, block_order(512)[0]].view(np.float32)
    assert relative(floats, g / (1 + np.exp(-g)) * u) < (4 * EXACT if step else HALVES)


@pytest.mark.parametrize("width", [16, 80, 768])
def test_activations_are_quantized_in_blocks_of_sixteen(device: str, width: int) -> None:
    random = np.random.default_rng(width)
    x = random.standard_normal((3, width)).astype(np.float32)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[0, :16] = 0
    words = activation_planes(x)
    out = torch.full(words.shape, 0x7FC12345, dtype=torch.int32, device=device)
    rows, nothing = torch.from_numpy(x).to(device), torch.zeros(1, device=device)
    no_norm = NormArgs(nothing, nothing, 0.0)
    add_norm_kernel[(3,)](
        rows, width, nothing, 0.0, 1.0, no_norm, no_norm, out,
        NORM=NormConfig(width, 64, False, False, False, False, False),
        OUT=WordsConfig(words.shape[2], PLANES), DEPENDENT=False,
    )  # fmt: skip
    actual = out.cpu().numpy()
    if not HAS_GPU:
        np.testing.assert_array_equal(actual, words)
        return
    # a GPU's quotient may differ slightly, and round to the next code
    assert np.abs(actual[:, :8].view(np.int8).astype(int) - words[:, :8].view(np.int8)).max() <= 1
    np.testing.assert_array_equal(actual[:, 12:], words[:, 12:])


def test_quantized_test_activations_match_their_source() -> None:
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    codes, scales = quantized(x)
    assert np.abs(codes).max() == 127
    assert np.abs(codes * scales - x.reshape(2, -1, 16)).max() <= scales.max() / 2
    assert sorted(block_order(1056)) == list(range(48))
