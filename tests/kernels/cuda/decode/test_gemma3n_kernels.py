"""The kernels of Gemma 3n's blocks against the formulas: odd widths, zeros and extreme scales."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpPredictSpec, AltUpPredictWeights, AltUpRouter
from edgeinfer_kernels.blocks.gemma3n.laurel import SUM_SCALE
from edgeinfer_kernels.cuda.blocks.gemma3n.altup_predict import pieces, row_warps, streams_config
from edgeinfer_kernels.cuda.triton_ops.gemma3n import altup
from edgeinfer_kernels.cuda.triton_ops.gemma3n.altup import RouterArgs
from edgeinfer_kernels.cuda.triton_ops.gemma3n.gaussian_feed_forward import (
    gaussian_hidden_kernel,
    gaussian_rows_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.gemma3n.rows import laurel_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InputArgs, NormArgs, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.reference.blocks.feed_forward import activate
from edgeinfer_kernels.reference.blocks.gemma3n import altup_predict as formula
from edgeinfer_kernels.reference.step import BlockStep, normalize
from tests.kernels.cuda.device_matrices import PLANES, block_order, relative

EXACT, TOKENS, GELU = 1e-5, 3, 1
NORM = NormSpec("rms", 1e-6)
SIZES = pytest.mark.parametrize(("count", "width"), [(2, 63), (3, 111), (4, 608), (5, 32)])
SPREADS = np.array([1.0, 1e14, 1e-10], np.float32)[:, None]
"""Factors of the tokens' rows."""


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(width: int, seed: int = 0) -> Any:
    """(TOKENS, width), from tiny to huge; a part is zero."""
    values = random(TOKENS, width, seed=seed) * SPREADS
    values[:, : width // 3] = 0
    return values


class Buffers:
    """Tensors on the device of the test; those to be written begin as NaN."""

    def __init__(self, device: str) -> None:
        self.device = device

    def of(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self.device)

    def nan(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def words(self, width: int) -> tuple[torch.Tensor, WordsConfig]:
        """Activations with the float values, and their layout."""
        blocks = padded_blocks(width)
        words = torch.full((TOKENS, PLANES, blocks), 0x7FC12345, dtype=torch.int32, device=self.device)
        return words, WordsConfig(blocks, PLANES)

    def following(self, width: int, gain: Any) -> tuple[InputArgs, WordsConfig]:
        words, layout = self.words(width)
        return InputArgs(words, self.of(gain), self.nan(TOKENS, -(-width // 16))), layout

    def router(self, router: AltUpRouter, coef: Any) -> RouterArgs:
        width = len(router.norm)
        gains = router.weight.reshape(-1, width) * router.norm / width
        return RouterArgs(self.of(gains), self.of(coef), NORM.epsilon)


def floats(words: torch.Tensor, width: int) -> Any:
    """The float values of activations, (TOKENS, width)."""
    values = words.cpu().numpy()[:, 12:, block_order(width)].transpose(0, 2, 1)
    return np.ascontiguousarray(values).view(np.float32).reshape(TOKENS, -1)[:, :width]


def assert_input(following: InputArgs, x: Any, gain: Any) -> None:
    """The input of the next block is x · gain, with the sums of squares of x."""
    width = x.shape[1]
    assert_rows(floats(following.words, width), x * gain)
    assert_rows(following.sums.cpu().numpy().sum(1, keepdims=True), (x * x).sum(1, keepdims=True))


def assert_rows(actual: Any, expected: Any) -> None:
    """Each row is close; its neighbors may be much larger."""
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < EXACT


def random_router(count: int, width: int) -> AltUpRouter:
    return AltUpRouter(3 * random(count * width, seed=7), random(width, seed=8))


def reference_step(count: int, x: Any, weights: Any, shared: Any) -> BlockStep:
    spec = AltUpPredictSpec(NORM, count, x.shape[1], is_first=False)
    return BlockStep(BlockIndex(0, 0), spec, weights, None, 0, x, x, np.float64, shared=shared)


@SIZES
@pytest.mark.parametrize("in_step", [True, False])
def test_predictions_equal_the_formula(device: str, count: int, width: int, in_step: bool) -> None:
    buffers, router, coef = Buffers(device), random_router(count, width), random(count**3, seed=2)
    streams = np.stack([rows(width, seed=index) for index in range(count)])
    held = buffers.of(np.concatenate([streams, np.full_like(streams[:1], np.nan)]))
    x, gain = buffers.nan(TOKENS, width), random(width, seed=3)
    following, layout = buffers.following(width, gain)
    config = streams_config(held)
    altup.altup_predict_kernel[pieces(width), TOKENS](
        held, held.stride(0), x, buffers.router(router, coef), following,
        STREAMS=config, GAIN=in_step, OUT=layout if in_step else None, DEPENDENT=False,
        num_warps=row_warps(config),
    )  # fmt: skip
    shared = {formula.STREAMS: streams.astype(np.float64).swapaxes(0, 1)}
    step = reference_step(count, shared[formula.STREAMS][:, 0], AltUpPredictWeights(router, coef), shared)
    formula.forward(step, step.x)
    expected = shared[formula.PREDICTIONS].swapaxes(0, 1)
    actual = held.cpu().numpy()
    np.testing.assert_array_equal(actual[0], streams[0])
    wanted_rows = [*expected[1:], expected[0], expected[0]]
    for got, wanted in zip([*actual[1:], x.cpu().numpy()], wanted_rows, strict=True):
        assert_rows(got, wanted)
    if in_step:
        assert_input(following, expected[0], gain)


@SIZES
@pytest.mark.parametrize("in_step", [True, False])
def test_corrected_streams_equal_the_formula(device: str, count: int, width: int, in_step: bool) -> None:
    buffers, router, coef = Buffers(device), random_router(count, width), random(count**2, seed=2)
    predictions = np.stack([rows(width, seed=index) for index in range(count)])
    nothing = np.full_like(predictions[:1], np.nan)
    held = buffers.of(np.concatenate([nothing, predictions[1:], predictions[:1]]))
    x, scale = rows(width, seed=20), random(width, seed=3)
    (words, layout), out, config = buffers.words(width), buffers.nan(TOKENS, width), streams_config(held)
    altup.altup_correct_kernel[pieces(width), TOKENS](
        held, held.stride(0), buffers.of(x), buffers.router(router, coef), buffers.of(scale),
        words if in_step else out, STREAMS=config, OUT=layout if in_step else None, DEPENDENT=False,
        num_warps=row_warps(config),
    )  # fmt: skip
    exact = x.astype(np.float64)
    results = formula.modalities(reference_step(count, exact, None, {}), exact, router)
    coefs = 1 + results @ coef.reshape(count, -1).T.astype(np.float64)
    expected = predictions + coefs.T[:, :, None] * (exact - predictions[0])
    for got, wanted in zip(held.cpu().numpy(), [*expected, predictions[0]], strict=True):
        assert_rows(got, wanted)
    assert_rows(floats(words, width) if in_step else out.cpu().numpy(), expected[0] * scale)


@SIZES
@pytest.mark.parametrize("scaled", [True, False])
def test_normed_results_are_added_to_all_but_the_first_stream(
    device: str, count: int, width: int, scaled: bool
) -> None:
    buffers, weight = Buffers(device), random(width, seed=5)
    streams, y = random(count + 1, TOKENS, width), rows(width, seed=6)
    scales = np.array([2.0, 0.25, 8.0], np.float32)
    held, config = buffers.of(streams), streams_config(buffers.of(streams))
    norm = NormArgs(buffers.of(weight), buffers.of(weight), NORM.epsilon)
    altup.altup_add_kernel[pieces(width), TOKENS](
        buffers.of(y), width, buffers.of(scales), held, held.stride(0), norm,
        STREAMS=config, SCALED=scaled, DEPENDENT=False, num_warps=row_warps(config),
    )  # fmt: skip
    exact = y.astype(np.float64) * (scales[:, None] if scaled else 1.0)
    expected = streams.astype(np.float64)
    expected[1:count] += normalize(exact, NORM, weight)
    for got, wanted in zip(held.cpu().numpy(), expected, strict=True):
        assert_rows(got, wanted)


@SIZES
def test_streams_are_expanded_and_merged_with_the_length_of_the_first(
    device: str, count: int, width: int
) -> None:
    buffers, first = Buffers(device), rows(width, seed=1)
    projected = random(TOKENS, count - 1, width, seed=2) * SPREADS[::-1, None]
    streams, mean = buffers.nan(count + 1, TOKENS, width), buffers.nan(TOKENS, width)
    config, products = streams_config(streams), buffers.of(projected)
    options = {"STREAMS": config, "DEPENDENT": False, "num_warps": row_warps(config)}
    altup.altup_expand_kernel[(TOKENS,)](
        buffers.of(first), products, products.stride(0), streams, streams.stride(0), **options
    )
    altup.altup_merge_kernel[(TOKENS,)](buffers.of(first), products, products.stride(0), mean, **options)
    whole = projected.astype(np.float64)
    length = np.linalg.norm(first.astype(np.float64), axis=1)[:, None, None]
    others = (whole * length / np.linalg.norm(whole, axis=2, keepdims=True)).swapaxes(0, 1)
    for got, wanted in zip(streams[:count].cpu().numpy(), [first, *others], strict=True):
        assert_rows(got, wanted)
    assert_rows(mean.cpu().numpy(), (first + others.sum(0)) / count)


@pytest.mark.parametrize("width", [63, 111, 608])
@pytest.mark.parametrize("in_step", [True, False])
def test_sums_of_laurel_equal_the_formula(device: str, width: int, in_step: bool) -> None:
    buffers, block = Buffers(device), next_power_of_two(width)
    before, y, x = rows(width), rows(width, seed=1), random(TOKENS, width, seed=2)
    weight, post_weight, gain = (random(width, seed=seed) for seed in (3, 4, 5))
    scales, held = np.array([2.0, 0.25, 8.0], np.float32), buffers.of(x)
    norm, post_norm = (NormArgs(buffers.of(each), held, NORM.epsilon) for each in (weight, post_weight))
    following, layout = buffers.following(width, gain)
    laurel_kernel[pieces(width), TOKENS](
        held, buffers.of(before), norm, buffers.of(y), width, buffers.of(scales), post_norm, SUM_SCALE,
        following, WIDTH=width, BLOCK=block, PIECE=min(256, block), SCALED=not in_step,
        GAIN=in_step, OUT=layout if in_step else None, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    product = y.astype(np.float64) * (1.0 if in_step else scales[:, None])
    h = normalize(before.astype(np.float64), NORM, weight)
    expected = SUM_SCALE * (x + h + normalize(product, NORM, post_weight))
    assert_rows(held.cpu().numpy(), expected)
    if in_step:
        assert_input(following, expected, gain)


def active(gate: Any, up: Any, deviations: float) -> Any:
    """The hidden rows of few active neurons."""
    threshold = gate.mean(1, keepdims=True) + deviations * gate.std(1, ddof=1, keepdims=True)
    return activate(np.maximum(gate - threshold, 0), "gelu") * up


@pytest.mark.parametrize("neurons", [63, 111, 1536])
@pytest.mark.parametrize("deviations", [1.6448533535003662, -0.5])
def test_hidden_rows_of_active_neurons_equal_the_formula(
    device: str, neurons: int, deviations: float
) -> None:
    buffers, block = Buffers(device), next_power_of_two(neurons)
    gate = (random(TOKENS, neurons) + np.float32(0.5)) * np.array([1.0, 1e3, 1e-3], np.float32)[:, None]
    up, scales = rows(neurons, seed=1), np.array([2.0, 0.25, 8.0], np.float32)
    both, (words, layout) = buffers.of(np.concatenate([gate, up], axis=1)), buffers.words(neurons)
    shape = {"NEURONS": neurons, "BLOCK": block, "ACTIVATION": GELU, "num_warps": 4}
    gaussian_hidden_kernel[-(-neurons // 512), TOKENS](
        both, both[:, neurons:], 2 * neurons, deviations, words,
        **shape, PIECE=min(512, block), OUT=layout, DEPENDENT=False,
    )  # fmt: skip
    expected = active(gate.astype(np.float64), up.astype(np.float64), deviations)
    assert 0 < np.count_nonzero(expected) < expected.size
    for got, wanted in zip(floats(words, neurons), expected, strict=True):
        assert relative(got, wanted) < EXACT
    out, row_scales = buffers.nan(TOKENS, neurons, dtype=torch.float16), buffers.nan(TOKENS)
    gaussian_rows_kernel[(TOKENS,)](
        buffers.of(gate), buffers.of(up), buffers.of(scales), deviations, out, row_scales,
        **shape, PIECE=min(512, block),
    )  # fmt: skip
    exact = [values.astype(np.float64) * scales[:, None] for values in (gate, up)]
    actual = out.double().cpu().numpy() * row_scales.double().cpu().numpy()[:, None]
    wanted = active(exact[0], exact[1], deviations)
    for index in (0, 1):  # The last row is too small for float16.
        assert relative(actual[index], wanted[index]) < 2e-3
    assert np.abs(actual[2] - wanted[2]).max() < 1e-7
