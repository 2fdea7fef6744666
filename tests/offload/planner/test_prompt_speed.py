"""Predicted prompt time where weights of the CPU may be streamed to the GPU."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.cost_constants import COPY_OVERLAP_LOSS
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from tests.offload.model_shapes import GIB, dense_model, laptop, moe_model, server, with_link

PLAN_OPTIONS = PlanOptions(1024)


def planned(model: ModelSizes, machine: Machine, vram: float, prompt: int = 512) -> MemoryPlan:
    return plan_memory(model, machine, replace(PLAN_OPTIONS, vram=int(vram * GIB), prompt=prompt))


def with_link_speed(machine: Machine, factor: float) -> Machine:
    assert machine.link is not None
    return with_link(machine, to_gpu=factor * machine.link.to_gpu)


def weights_here(plan: MemoryPlan) -> int:
    """Bytes of layers on the CPU."""
    return sum(item.bytes for item in plan.items if item.device == "cpu" and item.layer is not None)


def test_a_long_prompt_takes_as_long_as_streaming_the_cpu_weights() -> None:
    machine, model = server(), dense_model()
    plan = planned(model, machine, 1.2)
    assert machine.link is not None
    stream_seconds = weights_here(plan) / machine.link.to_gpu
    assert stream_seconds < plan.prediction.prompt_seconds < (1.05 + COPY_OVERLAP_LOSS) * stream_seconds
    slower = planned(model, with_link_speed(machine, 0.5), 1.2).prediction.prompt_seconds
    assert slower - plan.prediction.prompt_seconds == pytest.approx(stream_seconds, rel=0.1)


@pytest.mark.parametrize("model", [dense_model(), moe_model()], ids=["dense", "mixture"])
def test_weights_are_streamed_from_the_prompt_length_where_it_is_faster(model: ModelSizes) -> None:
    min_tokens = planned(model, laptop(), 3).prediction.stream_min_tokens
    assert min_tokens is not None
    assert 8 < min_tokens < 512
    below, at = (
        planned(model, laptop(), 3, prompt).prediction.prompt_seconds
        for prompt in (min_tokens - 1, min_tokens)
    )
    assert at == pytest.approx(below, rel=0.1)
    slow_link = planned(model, with_link_speed(laptop(), 1e-3), 3).prediction
    assert slow_link.stream_min_tokens is None or slow_link.stream_min_tokens > 512
    assert planned(model, laptop(), 3).prediction.prompt_seconds < slow_link.prompt_seconds


def test_an_moe_model_streams_used_experts_only() -> None:
    model, machine = moe_model(), with_link_speed(laptop(), 0.1)
    fast = replace(machine, processor=replace(machine.processor, operations_per_second=1e9))
    few, many = (planned(model, fast, 3, prompt).prediction.prompt_seconds for prompt in (8, 512))
    assert many < 4 * few
    assert many > 2 * few


def test_streamed_weights_are_counted_on_the_gpu() -> None:
    plan = planned(dense_model(), server(), 2.5)
    buffers = next(item for item in plan.items if item.item == "buffers for streamed weights")
    assert 4 * (16 << 20) <= buffers.bytes < 4 * (16 << 20) + (48 << 20)
    assert plan.bytes_on("gpu") <= plan.vram_bytes
