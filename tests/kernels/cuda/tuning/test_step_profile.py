"""Kernels' shares of a step, from recorded timings."""

import pytest

pytest.importorskip("torch")

from edgeinfer_kernels.cuda.tuning.step_profile import (
    KernelRun,
    KernelShare,
    seconds_between_steps,
    short_name,
    step_shares,
)

LAYER = ("rows_kernel", "decode_attention_kernel", "residual_kernel", "gated_kernel", "residual_kernel")


def steps(*lengths: int, begin: float = 0.0) -> list[KernelRun]:
    """Steps of `layers` layers; a run adds a second, half of which overlaps the previous one."""
    result, now = [], begin
    for layers in lengths:
        for index, name in enumerate(("embed_kernel", *LAYER * layers, "head_kernel")):
            result.append(KernelRun(name, now - 0.5 if index else now, now + 1.0))
            now += 1.0
        now += 10.0
    return result


def test_every_run_adds_the_time_after_the_end_of_the_previous_one() -> None:
    assert step_shares(steps(2, 2, 2)) == [
        KernelShare("embed", 1, 1.0),
        KernelShare("q, k, v", 2, 1.0),
        KernelShare("attention", 2, 1.0),
        KernelShare("output", 2, 1.0),
        KernelShare("gate and up", 2, 1.0),
        KernelShare("down", 2, 1.0),
        KernelShare("head", 1, 1.0),
    ]


def test_the_output_projection_follows_attention_or_what_adds_up_its_splits() -> None:
    names = ("embed_kernel", *LAYER[:2], "combine_splits_kernel", *LAYER[2:])
    runs = [KernelRun(name, at, at + 1.0) for at, name in enumerate(names)]
    roles = [share.role for share in step_shares(runs)]
    assert roles == ["embed", "q, k, v", "attention", "combine_splits", "output", "gate and up", "down"]


def test_truncated_steps_and_the_time_before_the_first_are_ignored() -> None:
    whole = steps(1, 1, 1)
    cut = [KernelRun("softmax_kernel", -9.0, -8.0), *whole, *steps(1, begin=100.0)[:3]]
    assert step_shares(cut) == step_shares(whole)
    assert sum(share.total_seconds for share in step_shares(cut)) == pytest.approx(7.0)


def test_an_empty_trace_gives_an_empty_profile() -> None:
    assert step_shares([KernelRun("head_kernel", 0.0, 1.0)]) == []


def test_the_time_between_steps_is_a_median() -> None:
    assert seconds_between_steps(steps(1, 1, 2, 1)) == pytest.approx(17.0)
    assert seconds_between_steps(steps(1)) == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gated_kernel", "gated_kernel"),
        ("ncclDevKernel_AllGather_RING_LL(ncclArgs<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        ("void c10d::(anonymous namespace)::one_shot_kernel<float, 16>(float**)", "one_shot_kernel"),
        ("void at::native::elementwise_kernel<128, at::f()::{lambda()#1}>(int)", "elementwise_kernel"),
    ],
)
def test_names_of_kernels_are_shortened(name: str, expected: str) -> None:
    assert short_name(name) == expected
