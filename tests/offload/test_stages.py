"""A plan is a list of stages: every part of the model is computed once, in order, and the split follows."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import CPU, GPU, CpuStages, Device, Shard, Stage, cpu_stages, shards_on
from edgeinfer_offload.planner.layer_placement import LayerPlacement, plan_stages
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from tests.offload.model_shapes import (
    GIB,
    cpu_only,
    dense_model,
    laptop,
    moe_model,
    single_blocks,
    with_link,
    with_shared_caches,
)

ON_CPU, ON_GPU = LayerPlacement("cpu", "cpu", 0, 1024), LayerPlacement("gpu", "gpu", 1024, 1024)


def test_a_device_has_a_kind_and_an_index() -> None:
    assert [Device.of(name) for name in ("cpu", "disk", "gpu")] == [CPU, CPU, GPU]
    assert Device.of("gpu2") == Device("gpu", 2)
    assert [Device.of(name).name for name in ("disk", "gpu", "gpu2")] == ["cpu", "gpu", "gpu2"]


def test_a_model_on_one_device_is_one_stage() -> None:
    for layer, name in ((ON_CPU, "cpu"), (ON_GPU, "gpu")):
        (stage,) = plan_stages([layer] * 3, name, name)
        assert (stage.device, stage.exchange) == (Device.of(name), "")
        assert stage.shards == tuple(Shard(index, True, range(1024)) for index in range(3))
    on_disk = replace(ON_CPU, attention="disk", rest="disk")
    assert {stage.device for stage in plan_stages([on_disk, ON_CPU], "cpu", "disk")} == {CPU}


def test_hidden_states_go_to_the_next_device_and_partial_sums_are_added() -> None:
    stages = plan_stages([ON_CPU, replace(ON_GPU, hot_neurons=512), ON_GPU], "gpu", "disk")
    assert stages == (
        Stage(CPU, (Shard(0, True, range(1024)),), "hidden_states"),
        Stage(GPU, (Shard(1, True),), "hidden_states"),
        Stage(GPU, (Shard(1, False, range(512)),), "partial_sums"),
        Stage(CPU, (Shard(1, False, range(512, 1024)),), "partial_sums"),
        Stage(GPU, (Shard(2, True, range(1024)),)),
    )


def test_a_feed_forward_entirely_on_the_cpu_moves_the_hidden_states_there() -> None:
    stages = plan_stages([replace(ON_GPU, hot_neurons=0), ON_CPU], "gpu", "cpu")
    assert stages == (
        Stage(CPU, (), "hidden_states"),
        Stage(GPU, (Shard(0, True),), "hidden_states"),
        Stage(CPU, (Shard(0, False, range(1024)), Shard(1, True, range(1024))), "hidden_states"),
        Stage(GPU, ()),
    )


def test_the_attention_in_parallel_with_a_feed_forward_on_the_cpu_follows_on_the_gpu() -> None:
    stages = plan_stages([replace(ON_GPU, hot_neurons=0, is_joined=True), ON_CPU], "gpu", "cpu")
    assert stages == (
        Stage(CPU, (), "hidden_states"),
        Stage(GPU, (Shard(0, True),), "hidden_states"),
        Stage(CPU, (Shard(0, False, range(1024)),), "partial_sums"),
        Stage(GPU, (), "hidden_states"),
        Stage(CPU, (Shard(1, True, range(1024)),), "hidden_states"),
        Stage(GPU, ()),
    )


def test_an_moe_layer_without_experts_on_the_gpu_adds_the_sums_of_the_cpu() -> None:
    stages = plan_stages([LayerPlacement("gpu", "gpu", experts=4)] * 2, "gpu", "disk")
    assert [(stage.device, stage.exchange) for stage in stages] == [
        (CPU, "hidden_states"),
        (GPU, "hidden_states"),
        (CPU, "partial_sums"),
        (GPU, "hidden_states"),
        (CPU, "partial_sums"),
        (GPU, ""),
    ]


def computed(plan: MemoryPlan) -> list[tuple[int, str, int]]:
    """Every part that any stage computes: layer, part, number."""
    shards = [shard for stage in plan.stages for shard in stage.shards]
    return [
        *((shard.layer, "undivided", 0) for shard in shards if shard.undivided),
        *((shard.layer, "neuron", number) for shard in shards for number in shard.neurons),
        *((shard.layer, "expert", number) for shard in shards for number in shard.experts),
    ]


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("vram", [0, 2, 3, 6, 8])
@pytest.mark.parametrize(
    "model",
    [dense_model(8), moe_model(8), single_blocks(dense_model(8)), single_blocks(moe_model(8))],
    ids=["dense", "mixture", "single blocks", "single blocks, mixture"],
)
def test_stages_compute_each_part_once_and_on_the_device_of_its_placement(
    model: ModelSizes, vram: float
) -> None:
    for expert_cache in (False, True):
        options = PlanOptions(4096, vram=int(vram * GIB / 4), expert_cache=expert_cache)
        plan = plan_memory(model, laptop(), options)
        result = computed(plan)
        assert len(result) == len(set(result)) == sum(1 + layer.granules for layer in plan.layers)
        here, there = shards_on(GPU, plan.stages), shards_on(CPU, plan.stages)
        for index, layer in enumerate(plan.layers):
            if layer.attention == "gpu":
                neurons = range(layer.hot_neurons)
                assert here.pop(index) == Shard(index, True, neurons, layer.gpu_experts)
            if layer.attention != "gpu" or layer.granules_on_gpu < layer.granules:
                shard = there.pop(index)
                assert shard.undivided == (layer.attention != "gpu")
                assert shard.holds_all == layer.expert_cache
        assert not here
        assert not there
        if len(plan.devices) > 1:
            assert (plan.stages[0].device, plan.stages[-1].device) == (CPU, GPU)


@pytest.mark.parametrize("streams", [False, True])
def test_layers_that_share_caches_have_all_attention_on_one_device(streams: bool) -> None:
    """With the attention on the GPU, feed-forwards are on either device."""
    model, machine, devices = with_shared_caches(dense_model(8), 4), laptop(), []
    link = {} if streams else {"to_gpu": float("inf")}
    for quarters in range(17):
        plan = plan_memory(model, with_link(machine, **link), PlanOptions(4096, vram=quarters * GIB // 4))
        attention = {layer.attention for layer in plan.layers}
        assert len(attention) == 1
        own = sum(layer.granules_on_gpu for layer in plan.layers)
        devices.append((plan.layers[0].attention, own < sum(layer.granules for layer in plan.layers)))
        assert plan.bytes_on("gpu") <= quarters * GIB // 4
        if quarters == 4:
            assert "all attention, its caches and the head together take" in str(plan.limit_reason)
    assert devices[0] == ("cpu", True)
    assert devices[-1] == ("gpu", False)
    assert ("gpu", True) in devices
    assert devices == sorted(devices, key=lambda each: (each[0] == "gpu", not each[1]))


def test_stages_are_a_function_of_the_placement_alone() -> None:
    slow = plan_memory(dense_model(4), cpu_only(), PlanOptions(4096))
    assert slow.stages == plan_memory(dense_model(4), laptop(), PlanOptions(64, device="cpu")).stages


@pytest.mark.parametrize(
    "devices",
    [(CPU, GPU, Device("gpu", 1)), (GPU, Device("gpu", 1)), (GPU, CPU, GPU), (CPU, GPU, CPU), (CPU,)],
)
def test_a_split_model_starts_on_the_cpu_and_ends_on_its_only_gpu(devices: tuple[Device, ...]) -> None:
    spec = DecoderSpec(8, 8, (), NormSpec("rms", 1e-5))
    stages = [Stage(CPU, ()), Stage(GPU, ())]
    assert cpu_stages(spec, GPU, stages) == CpuStages(((),), (), ())
    with pytest.raises(ValueError, match=f"saw stages on {', '.join(device.name for device in devices)}: "):
        cpu_stages(spec, GPU, [Stage(device, ()) for device in devices])
