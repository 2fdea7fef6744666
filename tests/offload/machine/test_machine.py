"""A machine: rates of formats, and GPUs."""

from dataclasses import replace

import pytest

from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from tests.offload.model_shapes import dense_model, laptop, server


def test_an_unmeasured_format_has_a_share_of_the_bandwidth() -> None:
    processor = replace(laptop().processor, kernels={"Q4_K": 2e10})
    assert processor.rate("Q4_K") == 2e10
    assert processor.rate("Q8_0") == pytest.approx(0.9 * 50e9)


def test_only_the_first_of_several_gpus_is_planned_for() -> None:
    (first,) = laptop().gpus
    (second,) = server().gpus
    machine = replace(laptop(), gpus=(first, second))
    assert (machine.graphics, machine.link) == (first, first.link)
    assert machine.with_gpu(second).gpus == (second, second)
    one, two = (plan_memory(dense_model(), each, PlanOptions(4096)) for each in (laptop(), machine))
    assert one.items == two.items
