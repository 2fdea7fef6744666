"""GPTQ: the error of the outputs falls, the blocks are ordinary ones, and strange inputs are survived."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer_quant_formats import block_format, decode, encode
from edgeinfer_quant_formats.codecs.hessian_rounding import ROUNDED, encode_by_hessian, inverse_factor

Floats = NDArray[np.float32]


def correlated_inputs(columns: int, count: int = 2000) -> Floats:
    random = np.random.default_rng(3)
    mixing = random.standard_normal((columns // 4, columns))
    inputs = random.standard_normal((count, columns // 4)) @ mixing
    return (inputs + 0.3 * random.standard_normal((count, columns))).astype(np.float32)


def output_error(weights: Floats, raw: NDArray[np.uint8], name: str, inputs: Floats) -> float:
    change = decode(raw, name).reshape(weights.shape) - weights
    return float(np.linalg.norm(inputs @ change.T))


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", ROUNDED)
def test_the_outputs_change_less_than_with_nearest_codes(name: str) -> None:
    weights = np.random.default_rng(4).standard_normal((24, 512)).astype(np.float32)
    inputs = correlated_inputs(512)
    ours = encode_by_hessian(weights, name, inputs.T @ inputs)
    importance = np.mean(inputs * inputs, axis=0)
    nearest = encode(weights, name, importance)
    assert ours.shape == (24, block_format(name).row_bytes(512))
    assert ours.dtype == np.uint8
    assert output_error(weights, ours, name, inputs) < 0.8 * output_error(weights, nearest, name, inputs)


def test_the_correction_is_the_least_squares_change_of_the_later_columns() -> None:
    inputs = correlated_inputs(64).astype(np.float64)
    hessian = inputs.T @ inputs
    factor = inverse_factor(hessian).astype(np.float64)
    damped = hessian + 0.01 * np.trace(hessian) / 64 * np.eye(64)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(64), atol=1e-3)
    expected = np.linalg.solve(damped[1:, 1:], damped[1:, 0])
    np.testing.assert_allclose(-factor[0, 1:] / factor[0, 0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("columns", [256, 300, 700])
def test_the_factor_of_several_blocks_is_that_of_the_inverse(columns: int) -> None:
    inputs = np.random.default_rng(7).standard_normal((2 * columns, columns))
    hessian = inputs.T @ inputs
    damped = hessian + 0.01 * np.trace(hessian) / columns * np.eye(columns)
    expected = np.linalg.cholesky(np.linalg.inv(damped)).T
    np.testing.assert_allclose(inverse_factor(hessian), expected, rtol=1e-5, atol=1e-7)


def test_without_inputs_and_with_zeros_the_weights_are_rounded_to_the_nearest() -> None:
    weights = np.random.default_rng(4).standard_normal((3, 64)).astype(np.float32)
    weights[1] = 0
    made = decode(encode_by_hessian(weights, "Q5_0", np.zeros((64, 64))), "Q5_0").reshape(3, 64)
    assert np.abs(made - weights).max() < 0.15
    assert not made[1].any()
