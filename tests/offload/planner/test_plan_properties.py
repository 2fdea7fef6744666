"""Properties of every plan, for any model, machine and budgets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.cpu.layout.packed_matrix import interleaved_bytes
from edgeinfer_kernels.sizes import cuda_matrices
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.machine.cost_constants import MAX_PREFILL_SLOWDOWN
from edgeinfer_offload.machine.hardware import Link, Machine
from edgeinfer_offload.planner.layer_placement import LayerPlacement
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from edgeinfer_quant_formats import GGUFFile
from tests.model_zoo import ZOO
from tests.offload.model_shapes import GIB, dense_model, laptop, mixed_model, moe_model, server, with_link

MODELS = {
    "dense": dense_model(),
    "mixed formats": mixed_model(),
    "small": dense_model(16, 2048, 8192, "Q8_0"),
    "mixture": moe_model(12),
    "mixture, shared": moe_model(12, shared=True),
    "mixture, latent": moe_model(12, latent=1024),
}
MACHINES = {
    "laptop": laptop(),
    "server": server(),
    "slow link": with_link(laptop(), to_gpu=3e9, from_gpu=3e9, sync_seconds=5e-4),
}
BUDGETS = [0.0, 0.3, 0.9, *np.linspace(1.0, 8.0, 15).tolist()]


def weights_of(layer: LayerSizes, placed: LayerPlacement) -> tuple[int, int]:
    """Bytes of a layer's weights on the CPU and on the GPU, counted independently."""
    sides = [0, 0]
    block = layer.divisible
    assert block is not None
    undivided = [matrix for each in layer.blocks for matrix in each.undivided()]
    if placed.attention == "gpu":
        sides[1] += sum(each.undivided_device_bytes() for each in layer.blocks)
        sides[1] += cuda_matrices.vector_bytes(block.undivided_vectors())
    else:
        sides[0] += sum(map(interleaved_bytes, undivided))
    if block.is_routed:
        hot = len(placed.gpu_experts)
        sides[1] += hot * block.granules_device_bytes()
        sides[0] += (block.granules - hot) * sum(map(interleaved_bytes, block.granule_matrices()))
        if placed.attention == "gpu" and hot < block.granules:
            sides[0] += sum(map(interleaved_bytes, block.replicated()))
        return sides[0], sides[1]
    if placed.hot_neurons:
        sides[1] += block.part(placed.hot_neurons).granules_device_bytes()
    if placed.hot_neurons < block.granules:
        cold = block.part(block.granules - placed.hot_neurons)
        sides[0] += sum(map(interleaved_bytes, cold.granule_matrices()))
    return sides[0], sides[1]


def check(plan: MemoryPlan, model: ModelSizes) -> None:
    assert plan.bytes_on("gpu") <= plan.vram_bytes
    assert plan.bytes_on("cpu") <= plan.ram_bytes
    for index, (layer, placed) in enumerate(zip(model.layers, plan.layers, strict=True)):
        own = [item for item in plan.items if item.layer == index and "keys and values" not in item.item]
        sides = tuple(sum(i.bytes for i in own if (i.device == "gpu") == gpu) for gpu in (False, True))
        assert sides == weights_of(layer, placed)
        (cache,) = [i for i in plan.items if i.item == f"layer {index} keys and values"]
        assert cache.device == placed.kv_cache
    awaited = sum(item.ms_per_token for item in plan.items if not item.overlapped)
    assert awaited == pytest.approx(plan.ms_per_token)
    assert min(item.ms_per_token for item in plan.items) >= 0


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_plans_fit_budgets_bytes_add_up_and_more_memory_is_never_slower(model: str, machine: str) -> None:
    sizes, before = MODELS[model], float("inf")
    for gibibytes in BUDGETS:
        options = PlanOptions(4096, vram=int(gibibytes * GIB))
        plan = plan_memory(sizes, MACHINES[machine], options)
        check(plan, sizes)
        assert plan.ms_per_token <= before * MAX_PREFILL_SLOWDOWN
        before = min(before, plan.ms_per_token)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_machines_and_budgets_give_a_plan_or_a_one_line_error(seed: int) -> None:
    random = np.random.default_rng(seed)

    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    base = laptop()
    assert base.graphics is not None
    graphics = replace(
        base.graphics,
        bytes_per_second=between(5e10, 4e12),
        operations_per_second=between(1e12, 1e15),
        link=Link(between(1e9, 6e10), 2e10, 4e9, 4e9, between(1e-6, 1e-3)),
    )
    processor = replace(
        base.processor, bytes_per_second=between(5e9, 3e11), operations_per_second=between(1e11, 1e13)
    )
    machine = Machine(processor, (graphics,))
    for name, model in MODELS.items():
        options = PlanOptions(
            int(between(64, 65536)),
            kv="q8_0" if seed % 3 == 0 else "f16",
            vram=int(between(1, 9 * GIB)),
            ram=int(between(GIB // 4, 30 * GIB)),
            disk=bool(seed % 2),
        )
        plan, reported = plan_or_line(model, machine, options)
        assert "\n" not in reported, name
        if plan:
            assert plan.bytes_on("gpu") <= plan.vram_bytes
            assert plan.bytes_on("cpu") <= plan.ram_bytes


def plan_or_line(model: ModelSizes, machine: Machine, options: PlanOptions) -> tuple[MemoryPlan | None, str]:
    """The plan, or its error message."""
    try:
        return plan_memory(model, machine, options), ""
    except PlanError as error:
        return None, str(error)


def test_a_plan_is_at_least_as_fast_as_whole_layers() -> None:
    model = dense_model()
    from edgeinfer_offload.planner.placement_problem import PlacementProblem
    from edgeinfer_offload.planner.placement_search import CPU, GPU, LayerDevices

    for gibibytes in (2, 3, 4, 5):
        problem = PlacementProblem(model, laptop(), PlanOptions(4096, vram=gibibytes * GIB))
        non_layer = problem.non_layer(GPU, CPU, None)
        room = problem.vram - problem.buffers.min_gpu_bytes
        fitting = []
        for whole in range(33):
            placements = [
                LayerDevices(GPU, cost.granules) if index >= 32 - whole else LayerDevices(CPU)
                for index, cost in enumerate(problem.costs)
            ]
            result = problem.search.placement(placements, non_layer)
            if result.gpu_bytes <= room:
                fitting.append(result.seconds)
        plan = plan_memory(model, laptop(), PlanOptions(4096, vram=gibibytes * GIB))
        assert plan.prediction.seconds <= MAX_PREFILL_SLOWDOWN * min(fitting) + 1e-5


def test_layers_that_read_values_of_another_one_are_on_one_device(tmp_path: Path) -> None:
    model = replace(ZOO["rwkv7"], width=512, feed_forward=2048, layers=4, formats=("Q8_0",))
    with GGUFFile.open(model.write(tmp_path / "model.gguf")) as file:
        config = read_config(file)
        sizes = ModelSizes.of(config.specification(), read_weights(file, config, shapes_only=True))
    whole = plan_memory(sizes, laptop(), PlanOptions(256))
    assert {layer.attention for layer in whole.layers} == {"gpu"}
    options = PlanOptions(256, vram=whole.bytes_on("gpu") - (1 << 20))
    assert {layer.attention for layer in plan_memory(sizes, laptop(), options).layers} == {"cpu"}
