"""Norms, residual sums, activations, RoPE and the cache of a prompt's tokens, against the reference."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, activation_rows, add_norm_rows, norm_rows
from edgeinfer_kernels.reference.blocks.feed_forward import activate
from edgeinfer_kernels.reference.step import normalize

RMS = NormSpec("rms", 1e-5)
LAYER = NormSpec("layer", 1e-6)


def random(*shape: int, seed: int = 0, spread: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def on(device: str, array: Any) -> Any:
    return None if array is None else torch.from_numpy(array.copy()).to(device)


def nan_tensor(device: str, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def rescaled(out: torch.Tensor, scales: torch.Tensor) -> Any:
    return (out.double() * scales.double()[:, None]).cpu().numpy()


@pytest.mark.parametrize("width", [63, 111, 576, 2048])
@pytest.mark.parametrize(("norm", "weighted", "biased"), [
    (RMS, True, False), (RMS, True, True), (LAYER, True, True), (LAYER, True, False), (RMS, False, False),
])  # fmt: skip
def test_norm_rows_equal_the_reference(
    device: str, width: int, norm: NormSpec, weighted: bool, biased: bool
) -> None:
    x = random(3, width, spread=3) + 1
    x[2] = 0
    weight, bias = random(width, seed=1) if weighted else None, random(width, seed=2) if biased else None
    out, scales = nan_tensor(device, 3, width), nan_tensor(device, 3, dtype=torch.float32)
    norm_rows(on(device, x), norm, on(device, weight), on(device, bias), out, scales)
    expected = normalize(x.astype(np.float64), norm, weight, bias)
    assert scales.tolist() == [1, 1, 1]
    np.testing.assert_allclose(rescaled(out, scales), expected, rtol=1e-3, atol=1e-3)


def test_a_row_too_large_for_float16_is_divided_by_a_power_of_two(device: str) -> None:
    x = random(4, 96)
    x[1] *= 1e5
    x[2] *= 1e20
    x[3] = 29999
    out, scales = nan_tensor(device, 4, 96), nan_tensor(device, 4, dtype=torch.float32)
    norm_rows(on(device, x), RMS, None, None, out, scales)
    assert scales[0] == 1
    assert scales[3] == 1
    assert (np.frexp(scales.cpu().numpy())[0] == 0.5).all()
    assert out.abs().max() <= 30000
    assert out[1:].abs().amax(dim=1).min() >= 14000
    np.testing.assert_allclose(rescaled(out, scales), x, rtol=1e-3, atol=float(1e-3 * scales.max()))
    np.testing.assert_allclose(rescaled(out, scales)[:2], x[:2], rtol=1e-3, atol=1e-2)


def test_non_finite_values_propagate(device: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 5] = np.nan, np.inf
    out, scales = (
        torch.zeros(2, 64, dtype=torch.float16, device=device),
        nan_tensor(device, 2, dtype=torch.float32),
    )
    norm_rows(on(device, x), RMS, None, None, out, scales)
    assert torch.isnan(out[0, 3])
    assert torch.isinf(out[1, 5])


@pytest.mark.parametrize("width", [111, 576])
@pytest.mark.parametrize("post", [None, RMS, LAYER])
@pytest.mark.parametrize("norm", [RMS, LAYER])
def test_add_norm_rows_add_the_residual_and_normalize_the_next_input(
    device: str, width: int, post: NormSpec | None, norm: NormSpec
) -> None:
    x, y, y_scales = random(3, width), random(3, width, seed=1), np.array([1, 2, 0.5], np.float32)
    y_bias, weight, bias = (random(width, seed=seed) for seed in (2, 3, 4))
    post_weight = None if post is None else random(width, seed=5)
    x_device = on(device, x)
    out, scales = nan_tensor(device, 3, width), nan_tensor(device, 3, dtype=torch.float32)
    add_norm_rows(
        x_device, ScaledRows(on(device, y), on(device, y_scales)), on(device, y_bias),
        NextNorm(post or RMS, on(device, post_weight), None), 0.7,
        NextNorm(norm, on(device, weight), on(device, bias)), ScaledRows(out, scales),
    )  # fmt: skip
    x = x.astype(np.float64)
    x += 0.7 * normalize(y.astype(np.float64) * y_scales[:, None] + y_bias, post or RMS, post_weight)
    np.testing.assert_allclose(x_device.cpu().numpy(), x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rescaled(out, scales), normalize(x, norm, weight, bias), rtol=1e-3, atol=1e-3)


def test_the_last_sum_has_no_norm(device: str) -> None:
    x, y = random(2, 80), random(2, 80, seed=1)
    x_device = on(device, x)
    ones = torch.ones(2, device=device)
    no_norm = NextNorm(RMS, None, None)
    add_norm_rows(x_device, ScaledRows(on(device, y).half(), ones), None, no_norm, 1.0, no_norm, None)
    np.testing.assert_allclose(x_device.cpu().numpy(), x + y.astype(np.float16), rtol=1e-6, atol=1e-6)


@pytest.mark.default_cases
@pytest.mark.parametrize("width", [63, 2048, 5632])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "relu_squared"])
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (True, True), (False, True)])
def test_activation_rows_equal_the_reference(
    device: str, width: int, activation: Activation, gated: bool, biased: bool
) -> None:
    both, in_scales = random(3, 2 * width, spread=2), np.array([1, 4, 1], np.float32)
    both[2] *= 1e3
    biases = random(2, width, seed=1) if biased else (None, None)
    product = on(device, both)
    out, scales = nan_tensor(device, 3, width), nan_tensor(device, 3, dtype=torch.float32)
    activation_rows(
        product[:, :width] if gated else None, product[:, width:], on(device, biases[0]),
        on(device, biases[1]), on(device, in_scales), activation, out, scales,
    )  # fmt: skip
    scaled = both.astype(np.float64) * in_scales[:, None]
    gate, up = scaled[:, :width], scaled[:, width:]
    if biased:
        gate, up = gate + biases[0], up + biases[1]
    with np.errstate(over="ignore"):
        expected = activate(gate, activation) * up if gated else activate(up, activation)
    largest = np.abs(expected).max(axis=1)
    assert ((scales.cpu().numpy() > 1) == (largest > 30000)).all()
    for row in range(3):
        np.testing.assert_allclose(
            rescaled(out, scales)[row], expected[row], rtol=1e-3, atol=1e-3 + 1e-6 * largest[row]
        )


def test_gate_and_up_of_different_strides_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="rows 8 and 16 apart, wanted one distance"):
        activation_rows(
            torch.zeros(2, 8), torch.zeros(2, 16)[:, :8], None, None, torch.ones(2), "silu",
            torch.zeros(2, 8).half(), torch.ones(2),
        )  # fmt: skip
