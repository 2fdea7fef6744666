"""The tuner with a fake clock and fake costs, and its stored results."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer_kernels.cuda.tuning import step_timer
from edgeinfer_kernels.cuda.tuning.step_shapes import (
    MAX_VECTOR_TOKENS,
    RowKernel,
    RowShapes,
    Shape,
    TensorShape,
    TensorShapes,
    Tuning,
    usual_tuning,
)
from edgeinfer_kernels.cuda.tuning.tuner import (
    CANDIDATES,
    FILE,
    RejectedCandidateError,
    save_tuning,
    saved_tuning,
    tune,
    tuning_key,
)
from edgeinfer_kernels.cuda.weights.device_block import CACHE_ELEMENTS
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from harness.empty_decoders import empty_decoder
from tests.kernels.cuda.decoders import opened
from tests.model_zoo import ZOO

ALL = sum(len(trials.changes) for trials in CANDIDATES)
KERNELS: tuple[RowKernel, ...] = ("gated", "down", "head", "qkv", "output")


class FakeStep:
    """A step with the time of `cost`; every timing of it takes a second."""

    def __init__(self, cost: Callable[[Tuning], float]) -> None:
        self._cost = cost
        self.now = 100.0
        self.timed: list[tuple[Tuning, int]] = []
        self.compiled: set[tuple[Tuning, int]] = set()

    def __call__(self, tuning: Tuning, tokens: int) -> float:
        self.now += 1
        self.timed.append((tuning, tokens))
        return self._cost(tuning)

    def compile(self, tunings: Sequence[Tuning], tokens: int) -> None:
        self.compiled.update((tuning, tokens) for tuning in tunings)

    def clock(self) -> float:
        return self.now


def parts(tuning: Tuning) -> dict[str, object]:
    """The values of a tuning that are tuned one by one."""
    values = {field.name: getattr(tuning, field.name) for field in fields(Tuning)}
    for name in ("one", "two", "four", "eight", "tensor_eight", "tensor_sixteen"):
        shapes = values.pop(name)
        values |= {f"{name}.{kernel}": shapes.of(kernel) for kernel in KERNELS}
    return values


def distance_from(best: Tuning) -> Callable[[Tuning], float]:
    """A second, and a tenth for each kernel with another tile config."""

    def cost(tuning: Tuning) -> float:
        wanted = parts(best)
        return 1 + 0.1 * sum(value != wanted[name] for name, value in parts(tuning).items())

    return cost


BEST = Tuning(
    one=RowShapes(Shape(32, 2), Shape(64, 8), Shape(128, 8), Shape(32, 4), Shape(128, 4)),
    two=RowShapes(Shape(64, 4, 2, 1), Shape(64, 4), Shape(64, 4), Shape(32, 4, 1, 1, 4), Shape(64, 4)),
    four=RowShapes(Shape(16, 2, 1), Shape(32, 4, 1), Shape(64, 4, 2), Shape(32, 8, 1, 1), Shape(16, 2, 1)),
    eight=RowShapes(
        Shape(32, 4, 1), Shape(32, 4, 1, 0, 2), Shape(64, 8, 2), Shape(32, 8, 1), Shape(32, 8, 1)
    ),
    positions=16, attention_warps=1,
    tensor_eight=TensorShapes(
        TensorShape(16, 2, 2), TensorShape(16, 8, 2, 1), TensorShape(), TensorShape(16, 4, 2, 1),
        TensorShape(32, 4, 2),
    ),
    tensor_sixteen=TensorShapes(
        TensorShape(16, 2, 2), TensorShape(16, 4, 2), TensorShape(16, 4, 2, 1), TensorShape(32, 4, 2),
        TensorShape(),
    ),
)  # fmt: skip


def test_the_best_tile_config_of_every_kernel_is_found() -> None:
    step = FakeStep(distance_from(BEST))
    result = tune(step, Tuning(), 1e6, step.clock)
    assert result.tuning == BEST
    # Of one token, timed before the steps of several tokens were tuned.
    assert result.seconds_before == step(Tuning(), 1)
    assert result.seconds == pytest.approx(3.3)
    assert ALL - len(CANDIDATES) <= result.trials <= ALL


def test_every_number_of_blocks_is_a_power_of_two() -> None:
    widths = range(1, MAX_VECTOR_TOKENS + 1)
    for tuning, tokens, blocks in product((Tuning(), BEST), widths, (1, 3, 20, 32, 80, 1000)):
        for kernel in KERNELS:
            shape = tuning.rows(tokens).of(kernel)
            for step in (shape.step_for(blocks), shape.float_step_for(blocks, tokens)):
                assert step & (step - 1) == 0 < step


def test_programs_share_rows_of_narrow_models_only() -> None:
    """Whose sixteen rows of the hidden states are few for the GPU; the sums of a step fit its buffer."""
    matrix = PlaneShapes.of("", "Q4_0", 2560, 9728)
    narrow, other = usual_tuning(90, 2560, 132), usual_tuning(90, 4096, 132)
    assert usual_tuning(90, 2560, 60) == usual_tuning(90, 2560).with_row_shape(1, "gated", Shape(32, 2))
    for tokens in range(1, MAX_VECTOR_TOKENS + 1):
        configs = [tuning.gemv("down", tokens, [matrix], splits=True)[0] for tuning in (narrow, other)]
        assert [config.splits for config in configs] == [{2: 4, 3: 2, 4: 2}.get(tokens, 1), 1]
        many = other.with_row_shape(tokens, "down", Shape(32, 4, 1, 1, 8))
        config, _ = many.gemv("down", tokens, [matrix], splits=True)
        assert config.splits * config.columns <= MAX_TOKENS
        assert matrix.blocks % config.splits == 0
        assert many.gemv("down", tokens, [matrix])[0].splits == 1


def test_kernels_whose_last_blocks_are_padding_take_smaller_steps() -> None:
    """Of narrow models: 80 blocks are two and a half steps of 32, and 64 blocks are two."""
    tunings = {width: usual_tuning(90, width, 132) for width in (2048, 2560)}
    smaller: list[tuple[int, RowKernel, int]] = [
        (1, "head", 32), (2, "gated", 16), (2, "head", 16), (3, "gated", 16), (4, "head", 16)
    ]  # fmt: skip
    for tokens, kernel, step in smaller:
        assert tunings[2560].rows(tokens).of(kernel).step == step
        assert tunings[2048].rows(tokens).of(kernel) == Tuning().rows(tokens).of(kernel)


@pytest.mark.parametrize(("kind", "unrolled"), [("Q4_0", 8), ("F16", 1), ("BF16", 1), ("F32", 1)])
def test_only_quantized_rows_have_code_for_whole_rows(kind: str, unrolled: int) -> None:
    """That of others would take minutes to compile."""
    matrix = PlaneShapes.of("", kind, 9728, 2560)
    config, _ = usual_tuning(90, 2560, 132).gemv("gated", 4, [matrix, matrix])
    assert config.unrolled == unrolled


def test_a_launch_multiplies_all_tokens_on_tensor_cores_or_eight_without() -> None:
    """Gate and up from five tokens on; q, k and v from nine on."""
    quantized, floats = (PlaneShapes.of("", kind, 80, 512) for kind in ("Q4_K", "F32"))
    without: dict[RowKernel, int] = {"gated": 4, "qkv": 8}
    for tuning, tokens, matrix in product(
        (Tuning(), usual_tuning(75)), range(1, MAX_TOKENS + 1), (quantized, floats)
    ):
        for kernel, most in without.items():
            parts = tuning.token_parts(kernel, tokens, [matrix])
            covered = [token for first, count in parts for token in range(first, first + count)]
            assert covered == list(range(tokens))
            is_tensor = tokens > most and matrix is quantized and tuning == Tuning()
            assert len(parts) == (1 if is_tensor else -(-tokens // 8))
            config, options = tuning.gemv(kernel, parts[0][1], [matrix])
            assert (config.warps == options["warps"]) == is_tensor
            assert matrix.padded_rows % (16 * config.groups) == 0


def test_registers_are_limited_for_quantized_weights_only() -> None:
    """Rows of floats need more registers than those of codes: they would spill."""
    quantized, floats = (PlaneShapes.of("", kind, 80, 512) for kind in ("Q4_0", "F16"))
    limits = [Tuning().gemv("qkv", 1, [matrix])[1]["registers"] for matrix in (quantized, floats)]
    assert limits[0] > 0
    assert limits[1] == 0


def test_only_compiled_steps_are_timed() -> None:
    """Apart from the best one so far, timed in a step of more tokens than before."""
    step = FakeStep(distance_from(BEST))
    tune(step, Tuning(), 1e6, step.clock)
    kept = {tuning for tuning, _ in step.compiled} | {Tuning()}
    assert {tuning for tuning, _ in step.timed} <= kept
    uncompiled = [each for each in step.timed if each not in step.compiled]
    assert len(uncompiled) <= 1 + len(CANDIDATES)


def test_less_than_a_third_of_a_percent_is_noise() -> None:
    step = FakeStep(lambda tuning: 1.0 if tuning == Tuning() else 0.998)
    assert tune(step, Tuning(), 1e6, step.clock).tuning == Tuning()
    step = FakeStep(lambda tuning: 1.0 if tuning == Tuning() else 0.996)
    assert tune(step, Tuning(), 1e6, step.clock).tuning != Tuning()


def test_a_config_that_is_faster_only_once_is_rejected() -> None:
    seen: set[Tuning] = {Tuning()}

    def fast_once(tuning: Tuning) -> float:
        speedup = 0.0 if tuning in seen else 0.5
        seen.add(tuning)
        return 1 - speedup

    step = FakeStep(fast_once)
    assert tune(step, Tuning(), 1e6, step.clock).tuning == Tuning()


def test_a_decreasing_clock_does_not_penalize_later_configs() -> None:
    step = FakeStep(lambda tuning: distance_from(BEST)(tuning) * (1 + step.now / 1e5))
    assert tune(step, Tuning(), 1e6, step.clock).tuning == BEST


@pytest.mark.parametrize("budget", [0, 1, 5, 20])
def test_no_config_is_tried_after_the_time_limit(budget: int) -> None:
    step = FakeStep(lambda _: 1.0)
    started = step.now
    result = tune(step, Tuning(), budget, step.clock)
    assert result.tuning == Tuning()
    assert step.now - started <= max(budget, 1) + 1  # The first one is timed before.


def test_configs_that_do_not_compile_are_skipped() -> None:
    def cost(tuning: Tuning) -> float:
        if tuning.one.gated.step == 128 or tuning.attention_warps == 1:
            raise RejectedCandidateError("out of shared memory")
        return distance_from(BEST)(tuning)

    step = FakeStep(cost)
    result = tune(step, Tuning(), 1e6, step.clock).tuning
    assert result.one.gated == Tuning().one.gated
    assert result.attention_warps != 1
    assert all(result.one.of(name) == BEST.one.of(name) for name in KERNELS if name != "gated")


def test_an_initial_config_that_does_not_compile_is_an_error() -> None:
    def cost(_: Tuning) -> float:
        raise RejectedCandidateError("12 words a thread are spilled")

    with pytest.raises(RejectedCandidateError, match="12 words a thread are spilled"):
        tune(FakeStep(cost), Tuning(), 1e6, lambda: 0.0)


def test_tunings_are_stored_by_key(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert saved_tuning(folder, "a") is None
    save_tuning(folder, "a", BEST)
    save_tuning(folder, "b", Tuning())
    assert saved_tuning(folder, "a") == BEST
    assert saved_tuning(folder, "b") == Tuning()
    assert saved_tuning(folder, "c") is None
    save_tuning(folder, "a", Tuning())
    assert saved_tuning(folder, "a") == Tuning()
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"splits": 64', '"splits": 128'),
        ('"splits": 64', '"splits": 31'),
        ('"splits": 64', '"splits": true'),
        ('"splits": 64', '"splits": 0'),
        ('"splits"', '"stretches"'),
        ('"positions": 16', '"positions": [16, 1]'),
        ('"positions": 16', '"positions": {"step": 16}'),
        ('"qkv": {', '"qkv": {"rows": 1, '),
        ('"unrolled": 1', '"unrolled": -1'),
        ('"registers": 0', '"registers": 100'),
        ('"registers": 0', '"registers": 8'),
        ('"a": {', '"a": [{}], "b": {'),
        ("{", ""),
    ],
)
def test_invalid_tunings_are_not_stored(tmp_path: Path, old: str, new: str) -> None:
    save_tuning(tmp_path, "a", BEST)
    file = tmp_path / FILE
    text = " ".join(file.read_text(encoding="utf-8").split()).replace("[ ", "[")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert saved_tuning(tmp_path, "a") is None
    save_tuning(tmp_path, "a", BEST)
    assert saved_tuning(tmp_path, "a") == BEST


def test_a_key_depends_on_gpu_shape_formats_and_cache() -> None:
    small, other = find_shape("smollm2-135m"), find_shape("qwen3-0.6b")
    keys = {
        tuning_key(gpu, *empty_decoder(shape, kind), kv)
        for gpu in ("RTX", "H200")
        for shape in (small, replace(small, feed_forward=1504), other)
        for kind in ("Q4_0", "Q8_0")
        for kv in CACHE_ELEMENTS
    }
    assert len(keys) == 2 * 3 * 2 * len(CACHE_ELEMENTS)
    assert tuning_key("RTX", *empty_decoder(small, "Q4_0"), "f16") in keys


def test_a_step_is_tuned_once_and_the_result_is_stored(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    class Timer:
        def __init__(self, step: Any) -> None:
            pass

        def __call__(self, tuning: Tuning, tokens: int) -> float:
            timed.append((tuning, tokens))
            return 1.0 if tuning.attention_warps == 2 else 2.0

        def compile(self, tunings: Sequence[Tuning], tokens: int) -> None:
            pass

    monkeypatch.setattr(step_timer, "StepTimer", Timer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(device)
        backend.tune(tmp_path / "tunings", 5.0)
        assert backend.step.tuning.attention_warps == 2
        count = len(timed)
        again = decoder.backend(device)
        again.tune(tmp_path / "tunings", 5.0)
        assert again.step.tuning == backend.step.tuning
        assert len(timed) == count
        backend.close()
        again.close()
