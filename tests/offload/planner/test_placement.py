"""Placement by machine and options, and the reason why nothing more is on a GPU."""

from dataclasses import replace

import pytest

from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.machine.cost_constants import CPU_BLOCK_SECONDS, MAX_EXPERT_CACHE_SLOWDOWN
from edgeinfer_offload.planner.layer_placement import LayerPlacement
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import NO_EXPERT_CACHE, plan_memory
from tests.offload.model_shapes import (
    GIB,
    MIB,
    PLAN_OPTIONS,
    cpu_only,
    dense_model,
    feed_forward,
    laptop,
    layer,
    moe_model,
    planned,
    server,
    with_link,
)


def test_a_model_that_fits_the_gpu_is_there_entirely() -> None:
    plan = planned(dense_model(), 8)
    assert plan.device == plan.head == plan.embedding == "gpu"
    assert plan.layers == (LayerPlacement("gpu", "gpu", 14336, 14336),) * 32
    assert plan.limit_reason is None
    assert plan.rate_with_one_gib_more is None
    assert plan.prediction.stream_min_tokens is None
    assert not [item.item for item in plan.items if item.bytes and item.device == "cpu"][1:]


def test_without_a_gpu_all_is_on_the_cpu_and_the_embedding_is_memory_mapped() -> None:
    plan = plan_memory(dense_model(), cpu_only(), PLAN_OPTIONS)
    assert (plan.device, plan.head, plan.embedding) == ("cpu", "cpu", "disk")
    assert plan.layers == (LayerPlacement("cpu", "cpu", 0, 14336),) * 32
    assert plan.bytes_on("gpu") == 0
    assert plan.file_bytes == dense_model().table.nbytes
    assert plan.limit_reason == "nothing is on a GPU: there is no GPU"
    head = next(item for item in plan.items if item.item == "head")
    assert head.bound == "CPU memory"
    assert head.ms_per_token == pytest.approx(1000 * (head.bytes / (0.9 * 50e9) + CPU_BLOCK_SECONDS))


def test_too_little_vram_for_the_buffers_uses_the_cpu_and_reports_it() -> None:
    for vram in (0, 0.5):
        plan = planned(dense_model(), vram)
        assert plan.device == "cpu"
        assert plan.limit_reason is not None
        assert plan.limit_reason.startswith("nothing is on the GPU: its buffers and libraries alone take ")
        assert plan.limit_reason.endswith(f"{vram * 1024:.{1 if vram == 0 else 0}f} MiB may be used")


def test_feed_forwards_are_split_so_that_both_devices_work() -> None:
    plan = planned(dense_model(), 3)
    split = [item for item in plan.layers if 0 < item.hot_neurons < item.neurons]
    assert split
    assert all(item.hot_neurons % 512 == 0 for item in split)
    overlapped = [item for item in plan.items if item.overlapped]
    assert len(overlapped) == len(split)
    awaited = sum(item.ms_per_token for item in plan.items if not item.overlapped)
    assert awaited == pytest.approx(plan.ms_per_token)


def test_whole_layers_are_placed_if_synchronization_costs_too_much() -> None:
    machine = server()
    slow = with_link(machine, sync_seconds=2e-3)
    plan = plan_memory(dense_model(), slow, replace(PLAN_OPTIONS, vram=3 * GIB))
    assert any(layer.whole_on == "gpu" for layer in plan.layers)
    # At most two changes of device: no layer is split but one at the limit.
    assert sum(layer.whole_on is None for layer in plan.layers) <= 1
    crossings = sum(a.attention != b.attention for a, b in zip(plan.layers, plan.layers[1:], strict=False))
    assert crossings <= 2


def test_moe_attention_is_placed_first_and_experts_as_they_fit() -> None:
    small, large = planned(moe_model(), 2.5), planned(moe_model(), 8)
    assert [layer.attention for layer in small.layers] == ["gpu"] * 48
    assert 0 < sum(len(layer.gpu_experts) for layer in small.layers) < 48 * 64
    assert sum(len(layer.gpu_experts) for layer in large.layers) > 2 * sum(
        len(layer.gpu_experts) for layer in small.layers
    )
    assert all(layer.experts == 128 and layer.neurons == 0 for layer in small.layers)
    assert large.prediction.decode_tokens_per_second > small.prediction.decode_tokens_per_second


def test_the_hottest_experts_are_on_the_gpu_and_make_it_faster() -> None:
    probs = tuple(8 * 0.5 if number == 77 else 8 * 0.5 / 127 for number in range(128))
    routing = (probs,) * 48
    uniform, known = planned(moe_model(), 3), planned(moe_model(), 3, routing=routing)
    holding = [layer for layer in known.layers if layer.gpu_experts]
    assert holding
    assert all(77 in layer.gpu_experts for layer in holding)
    assert known.ms_per_token < uniform.ms_per_token


def test_a_shared_expert_is_placed_with_its_attention() -> None:
    plan = planned(moe_model(shared=True), 3)
    items = {(item.layer, item.device) for item in plan.items if "router and shared expert" in item.item}
    assert items == {(index, layer.attention) for index, layer in enumerate(plan.layers)}


def test_a_draft_model_goes_first() -> None:
    draft = dense_model(4, 1024, 4096, vocabulary=32000)
    plan = planned(dense_model(), 1.8, draft=draft)
    assert plan.draft == "gpu"
    without = plan_memory(dense_model(), cpu_only(), replace(PLAN_OPTIONS, draft=draft))
    assert without.draft == "cpu"
    assert without.prediction.seconds == pytest.approx(
        plan_memory(dense_model(), cpu_only(), PLAN_OPTIONS).prediction.seconds
    )


def test_token_embeddings_go_last() -> None:
    plan = planned(dense_model(), 4)
    assert plan.embedding == "disk"
    assert plan.head == "gpu"


def test_an_error_adds_up_the_parts_of_all_layers() -> None:
    with pytest.raises(PlanError, match=r"the largest part is the feed-forward with \d\.\d\d GiB"):
        planned(dense_model(), 0, ram=2 * GIB)
    with pytest.raises(PlanError, match=r"the largest part is the KV cache with \d+\.?\d* GiB"):
        plan_memory(dense_model(), laptop(ram=2 * GIB), replace(PLAN_OPTIONS, vram=0, context=1 << 20))


def test_weights_over_main_memory_are_memory_mapped_if_allowed() -> None:
    with pytest.raises(
        PlanError, match=r"needs \d\.\d\d GiB on the cpu, 2\.00 GiB may be used; the largest part is"
    ):
        planned(dense_model(), 0, ram=2 * GIB)
    plan = plan_memory(dense_model(), laptop(ram=2 * GIB), replace(PLAN_OPTIONS, vram=0, disk=True))
    assert plan.bytes_on("cpu") <= 2 * GIB
    spilled = [item for item in plan.items if item.device == "disk" and item.layer is not None]
    assert spilled
    assert {item.bound for item in spilled} == {"disk"}
    assert {layer.rest for layer in plan.layers} == {"disk"}
    assert {layer.attention for layer in plan.layers} == {"cpu", "disk"}
    assert plan.head == "cpu"
    assert sum(item.ms_per_token for item in spilled) > sum(item.bytes for item in spilled) / 1.2e9 * 1000
    assert "each token reads the rest from the disk again" in plan.explain()


def test_weights_that_fit_memory_are_not_memory_mapped() -> None:
    for ram in (16, 5):
        options = replace(PLAN_OPTIONS, vram=3 * GIB, ram=ram * GIB)
        plan = plan_memory(dense_model(), laptop(), options)
        assert plan_memory(dense_model(), laptop(), replace(options, disk=True)) == plan


def test_a_split_model_over_main_memory_is_memory_mapped_and_streams_nothing() -> None:
    for model, vram in ((dense_model(), 3), (moe_model(), 4)):
        options = replace(PLAN_OPTIONS, vram=vram * GIB, ram=GIB, disk=True, expert_cache=True)
        plan = plan_memory(model, laptop(), options)
        assert (plan.head, plan.options.disk) == ("gpu", True)
        assert plan.prediction.stream_min_tokens is None
        assert plan.bytes_on("cpu") <= GIB
        assert any(layer.rest == "disk" and layer.attention == "gpu" for layer in plan.layers)
        assert not any(layer.expert_cache for layer in plan.layers)
        assert (NO_EXPERT_CACHE in plan.relaxations) == any(layer.has_some_experts for layer in plan.layers)


def test_page_cached_weights_are_read_from_the_disk_once() -> None:
    options = replace(PLAN_OPTIONS, device="cpu", ram=2 * GIB, disk=True)
    small, large = (plan_memory(dense_model(), cpu_only(ram), options) for ram in (4 * GIB, 24 * GIB))
    assert small.layers == large.layers
    assert small.bytes_on("disk") == large.bytes_on("disk")
    assert "from the disk again" in small.explain()
    assert "from the disk again" not in large.explain()
    whole = plan_memory(dense_model(), cpu_only(24 * GIB), replace(options, ram=None))
    assert whole.ms_per_token < large.ms_per_token < 3.1 * whole.ms_per_token < small.ms_per_token


def test_memory_mapped_weights_use_no_memory() -> None:
    plan = plan_memory(dense_model(), cpu_only(2 * GIB), replace(PLAN_OPTIONS, repack=False))
    assert plan.bytes_on("cpu") < 2 * GIB
    assert plan.file_bytes == dense_model().nbytes
    assert {layer.rest for layer in plan.layers} == {"disk"}
    assert plan.head == "disk"
    roomy = plan_memory(dense_model(), cpu_only(8 * GIB), replace(PLAN_OPTIONS, repack=False))
    read = sum(item.weights_read for item in plan.items)
    kept = (2 * GIB - plan.bytes_on("cpu")) / 2
    assert plan.ms_per_token == pytest.approx(roomy.ms_per_token + (read - kept) / 2e9 * 1000, 0.01)


def test_a_cache_type_without_gpu_kernels_keeps_the_model_on_the_cpu() -> None:
    plan = planned(dense_model(), 8, kv="f32")
    assert plan.device == "cpu"
    assert plan.limit_reason == "nothing is on a GPU: keys and values in f32 run on the CPU only"


def test_rows_without_gpu_kernels_keep_the_model_on_the_cpu() -> None:
    model = replace(dense_model(), head=MatrixSize("output.weight", "F16", 128256, 4100))
    plan = planned(model, 8)
    assert plan.device == "cpu"
    assert plan.limit_reason is not None
    assert "output.weight: rows of 4100 weights, the GPU kernels need a multiple of 32" in plan.limit_reason
    with pytest.raises(PlanError, match="rows of 4100 weights"):
        planned(model, 8, device="gpu")


def test_weights_with_a_grid_are_on_both_devices_and_are_not_streamed() -> None:
    plans = [planned(dense_model(kind=kind), 3) for kind in ("Q4_0", "IQ3_S")]
    assert [plan.placement for plan in plans] == ["split", "split"]
    assert [plan.prediction.stream_min_tokens is None for plan in plans] == [False, True]


def test_a_layer_smaller_than_a_neuron_group_is_not_split() -> None:
    tiny = layer(256, 4, 2, "Q8_0", feed_forward(256, 448, "Q8_0"))
    model = ModelSizes(256, 1024, (tiny,) * 4, MatrixSize("output", "Q8_0", 1024, 256))
    for vram in range(720, 800, 8):
        plan = plan_memory(model, laptop(), replace(PLAN_OPTIONS, context=64, vram=vram * MIB))
        assert {layer.hot_neurons for layer in plan.layers} <= {0, 448}


def test_the_expert_cache_has_equal_slots_per_layer_and_all_experts_in_main_memory() -> None:
    options = PlanOptions(4096, vram=4 * GIB, expert_cache=True)
    fixed = plan_memory(moe_model(), laptop(), PlanOptions(4096, vram=4 * GIB))
    cached = plan_memory(moe_model(), laptop(), options)
    slots = [len(layer.gpu_experts) for layer in cached.layers]
    assert len(set(slots)) == 1
    assert all(layer.expert_cache and layer.has_some_experts for layer in cached.layers)
    before = sum(len(layer.gpu_experts) for layer in fixed.layers)
    on_their_way = next(item.bytes for item in cached.items if item.item == "expert cache buffers")
    one = next(item.bytes for item in cached.items if item.device == "gpu" and "experts, " in item.item)
    spare = len(slots) + on_their_way / (one / slots[0])
    assert before - spare - len(slots) < sum(slots) <= before
    assert cached.bytes_on("gpu") <= fixed.bytes_on("gpu")
    assert cached.limit_reason is not None
    assert cached.limit_reason.startswith("the GPU's experts change while decoding")
    # The prediction assumes uniform routing, for which whole layers are a little better.
    assert 1.0 < cached.prediction.seconds / fixed.prediction.seconds <= MAX_EXPERT_CACHE_SLOWDOWN
    there = sum(
        i.bytes for i in cached.items if i.device == "gpu" and i.layer is not None and "experts" in i.item
    )
    more = cached.bytes_on("cpu") - fixed.bytes_on("cpu")
    assert 0.8 * there < more <= 1.05 * there


def test_no_expert_cache_without_main_memory_or_gain() -> None:
    options = PlanOptions(4096, vram=4 * GIB, expert_cache=True)
    fixed = plan_memory(moe_model(), laptop(), PlanOptions(4096, vram=4 * GIB))
    short = plan_memory(moe_model(), laptop(), replace(options, ram=fixed.bytes_on("cpu") + GIB // 8))
    assert not any(layer.expert_cache for layer in short.layers)
    assert short.prediction.seconds == pytest.approx(fixed.prediction.seconds, rel=1e-9)
    assert short.relaxations == (NO_EXPERT_CACHE,)
    slow = with_link(laptop(), sync_seconds=1e-3)
    plan = plan_memory(moe_model(), slow, options)
    assert not any(layer.expert_cache for layer in plan.layers)
    assert plan.relaxations == ()


def test_without_a_split_moe_model_the_plan_omits_experts() -> None:
    plan = plan_memory(dense_model(), laptop(), PlanOptions(4096, vram=2 * GIB, expert_cache=True))
    assert plan == replace(
        plan_memory(dense_model(), laptop(), PlanOptions(4096, vram=2 * GIB)), options=plan.options
    )


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model", [dense_model(), moe_model()], ids=["dense", "mixture"])
def test_a_head_is_never_alone_on_the_gpu(model: ModelSizes) -> None:
    smallest = plan_memory(model, laptop(), replace(PLAN_OPTIONS, vram=2 * GIB))
    non_layer_bytes = sum(i.bytes for i in smallest.items if i.device == "gpu" and i.layer is None)
    head_devices = set()
    for extra in range(-30, 60, 3):
        plan = plan_memory(model, laptop(), replace(PLAN_OPTIONS, vram=non_layer_bytes + extra * MIB))
        head_devices.add(plan.head)
        assert plan.head == "cpu" or any(layer.attention == "gpu" for layer in plan.layers)
    assert head_devices == {"cpu", "gpu"}
