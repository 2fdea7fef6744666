"""A plan is a pure function of sizes, a machine and options: its bytes, predictions and text."""

import json
import re
from dataclasses import replace

import pytest

from edgeinfer_kernels.blocks.common.block_sizes import DivisibleSizes
from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP
from edgeinfer_kernels.cpu.layout.packed_matrix import interleaved_bytes
from edgeinfer_kernels.sizes.cuda_buffers import STREAMED_PIECES, streamed_piece_bytes
from edgeinfer_kernels.sizes.gathered_neurons import gathering_bytes
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions, Repacking
from edgeinfer_offload.planner.planner import largest_context, plan_memory
from edgeinfer_offload.planner.sparse_types import SparseLayer, SparseOptions
from tests.offload.model_shapes import (
    GIB,
    MIB,
    PLAN_OPTIONS,
    cpu_only,
    dense_model,
    feed_forward,
    laptop,
    mixed_model,
    moe_model,
    planned,
    server,
    with_link,
)


def test_a_budget_is_limited_to_the_machine_memory() -> None:
    plan = planned(dense_model(), 1000, ram=1000 * GIB)
    assert (plan.vram_bytes, plan.ram_bytes) == (8 * GIB, 24 * GIB)


def test_a_baseline_token_does_not_wait_for_the_draft() -> None:
    draft = dense_model(4, 1024, 4096, vocabulary=32000)
    for machine in (cpu_only(), laptop()):
        plan = plan_memory(dense_model(), machine, replace(PLAN_OPTIONS, draft=draft))
        (item,) = [item for item in plan.items if item.item == "draft model"]
        assert item.ms_per_token > 0
        awaited = sum(item.ms_per_token for item in plan.items if not item.overlapped)
        assert awaited == pytest.approx(plan.ms_per_token)
        line = next(line for line in plan.explain().splitlines() if line.startswith("draft model"))
        assert line.endswith("  drafting")


def test_memory_mapped_experts_are_read_as_often_as_they_are_used() -> None:
    plan = plan_memory(moe_model(), laptop(ram=8 * GIB), replace(PLAN_OPTIONS, vram=0, disk=True))
    spilled = [item for item in plan.items if item.bound == "disk"]
    whole = sum(item.bytes for item in spilled) / 1.2e9 * 1000
    assert whole / 16 < sum(item.ms_per_token for item in spilled) < whole / 12


def test_a_sparse_cpu_shard_costs_its_bytes_read() -> None:
    model, neurons = dense_model(), 14336
    whole = feed_forward(4096, neurons, "Q4_K")
    held = sum(map(interleaved_bytes, whole.matrices()))
    groups = -(-neurons // NEURON_GROUP)
    hot_first = tuple(1 - (1 - group / groups) ** 3 for group in range(groups + 1))
    plans = []
    for activity in ((), hot_first):
        one = SparseLayer(held, held // 3 + held // 6, held // 6, 0, held, activity)
        sparse_options = SparseOptions(dict.fromkeys(range(32), one), 0, 0)
        plans.append(plan_memory(model, laptop(), replace(PLAN_OPTIONS, vram=3 * GIB, sparse=sparse_options)))
    dense = planned(model, 3)
    assert plans[1].ms_per_token < plans[0].ms_per_token < 0.8 * dense.ms_per_token
    for plan in plans:
        assert plan.prediction.stream_min_tokens is not None
        assert any(0 < layer.hot_neurons < layer.neurons for layer in plan.layers)
        for item in plan.items:
            if item.item.endswith(", by neuron"):
                assert item.device == "cpu"
                assert item.weights_read < 0.51 * item.bytes
        there = sum(item.bytes for item in plan.items if "long steps" in item.item)
        here = sum(item.bytes for item in plan.items if item.item.endswith(", by neuron"))
        assert there == pytest.approx(here, rel=1e-6)


def test_a_gpu_gathers_active_neurons_where_its_plan_is_faster() -> None:
    model, neurons = dense_model(), 14336
    held = sum(map(interleaved_bytes, feed_forward(4096, neurons, "Q4_K").matrices()))
    dense = plan_memory(model, laptop(), PLAN_OPTIONS)
    for active, gathers in ((0.05, True), (0.6, False)):
        scattered = round(2 / 3 * active * held)
        one = SparseLayer(held, held // 3 + held // 20 + scattered, scattered, 0, held)
        sparse_options = SparseOptions({}, 0, 0, gathered=dict.fromkeys(range(32), one))
        plan = plan_memory(model, laptop(), replace(PLAN_OPTIONS, sparse=sparse_options))
        assert {layer.gathers for layer in plan.layers if layer.hot_neurons} == {gathers}
        assert (plan.ms_per_token < 0.9 * dense.ms_per_token) == gathers
        items = [item for item in plan.items if item.item.endswith("active gathered")]
        assert len(items) == (32 if gathers else 0)
        assert all(item.device == "gpu" and item.weights_read < 0.5 * item.bytes for item in items)
        assert plan.bytes_on("gpu") - dense.bytes_on("gpu") == gathering_bytes(neurons, 4096)


def test_a_budget_too_small_for_memory_mapping_gives_a_one_line_error() -> None:
    with pytest.raises(
        PlanError, match=r"^the model needs \d+\.\d MiB on the cpu, 1\.0 MiB may be used; "
    ) as e:
        plan_memory(dense_model(), laptop(), replace(PLAN_OPTIONS, device="gpu", ram=MIB, disk=True))
    assert "\n" not in str(e.value)
    with pytest.raises(
        PlanError, match=r"^the model needs \d\.\d\d GiB on the cpu, 512 MiB may be used; the larg"
    ) as e:
        planned(dense_model(), 0, ram=512 * MIB, disk=True)
    assert "\n" not in str(e.value)


def test_options_are_relaxed_in_order_and_reported() -> None:
    only = replace(PLAN_OPTIONS, device="gpu", vram=int(5.75 * GIB), context=16384)
    with pytest.raises(PlanError, match=r"on the gpu, 5\.75 GiB may be used"):
        plan_memory(dense_model(), laptop(), only)
    relaxed = plan_memory(dense_model(), laptop(), replace(only, kv_may_shrink=True, min_context=1024))
    assert relaxed.options.kv == "q8_0"
    assert relaxed.options.context < 16384
    assert relaxed.relaxations == (
        "keys and values are q8_0 instead of f16",
        f"the context is {relaxed.options.context}, not 16384",
    )
    assert all(f"so that it fits, {step}" in relaxed.explain() for step in relaxed.relaxations)
    shorter = plan_memory(dense_model(), laptop(), replace(only, min_context=1024))
    assert shorter.options.kv == "f16"
    assert len(shorter.relaxations) == 1


def test_a_gpu_also_needs_main_memory() -> None:
    with pytest.raises(PlanError, match=r"31\.8 MiB on the cpu, 1\.0 MiB may be used; .* pinned buffers"):
        planned(dense_model(), 8, device="gpu", ram=MIB)


def test_an_eight_bit_cache_is_used_on_both_devices() -> None:
    plan = planned(dense_model(), 2.5, kv="q8_0")
    caches = {item.device: item.bytes for item in plan.items if "keys and values" in item.item}
    here, there = (8 * (8192 + spare) * (128 + 4 * 2) * 2 for spare in (64, 16))
    assert caches == {"cpu": here, "gpu": there}
    everything = planned(dense_model(), 8, kv="q8_0")
    assert {i.bytes for i in everything.items if "keys and values" in i.item} == {there}


def test_the_bytes_on_the_gpu_are_those_of_the_kernels_layout() -> None:
    model = dense_model()
    plan = planned(model, 8)
    items = {item.item: item.bytes for item in plan.items}
    attention, feed_forward = model.layers[3].blocks
    assert isinstance(feed_forward, DivisibleSizes)
    assert items["layer 3 attention"] == attention.undivided_device_bytes()
    assert items["layer 3 feed-forward"] == feed_forward.granules_device_bytes()
    assert items["head"] == model.head_device_bytes()


def test_the_next_item_for_the_gpu_is_named_with_the_free_bytes() -> None:
    plan = planned(moe_model(), 3)
    left = plan.vram_bytes - plan.bytes_on("gpu")
    assert plan.limit_reason is not None
    room = f"{left / MIB:.1f} MiB are left of 3.00 GiB"
    assert re.fullmatch(
        rf"next on the GPU would be layer \d+ experts with \d+ MiB; {room}", plan.limit_reason
    )


def test_a_deeper_cache_is_slower_and_a_window_bounds_it() -> None:
    result = plan_memory(dense_model(), cpu_only(), PLAN_OPTIONS).prediction
    assert result.seconds_empty < result.seconds < result.seconds_full
    bounded = plan_memory(dense_model(window=512), cpu_only(), PLAN_OPTIONS).prediction
    assert bounded.seconds == bounded.seconds_full < result.seconds


def test_a_prompt_streams_weights_over_the_link_from_some_length_on() -> None:
    result = planned(dense_model(), 4, context=1024).prediction
    assert result.stream_min_tokens is not None
    assert 8 < result.stream_min_tokens < 512
    short, long = (planned(dense_model(), 4, context=1024, prompt=n).prediction for n in (4, 512))
    assert long.prefill_tokens_per_second > 5 * short.prefill_tokens_per_second


@pytest.mark.parametrize(
    ("shape", "kind", "measured_empty", "measured_full"),
    [
        ("8B", "Q4_0", 620, 530),
        ("8B", "Q8_0", 438, None),
        ("1B", "Q4_0", 2151, None),
    ],
)
def test_the_speeds_measured_on_an_h200_are_predicted_within_fifteen_percent(
    shape: str, kind: str, measured_empty: float, measured_full: float | None
) -> None:
    model = dense_model(kind=kind) if shape == "8B" else dense_model(16, 2048, 8192, kind)
    if kind == "Q8_0":
        model = replace(model, head=replace(model.head, format="Q8_0"))
    result = plan_memory(model, server(), PlanOptions(4160, depth=64)).prediction
    assert 1 / result.seconds == pytest.approx(measured_empty, rel=0.15)
    if measured_full:
        assert 1 / result.seconds_full == pytest.approx(measured_full, rel=0.15)


def test_the_largest_context_is_where_planning_ends() -> None:
    options = replace(PLAN_OPTIONS, device="gpu", vram=6 * GIB)
    most = largest_context(dense_model(), laptop(), options, trained=1 << 20)
    plan_memory(dense_model(), laptop(), replace(options, context=most))
    with pytest.raises(PlanError):
        plan_memory(dense_model(), laptop(), replace(options, context=most + 1))
    assert largest_context(dense_model(), laptop(), options, trained=2048) == 2048


def test_json_has_every_item_and_the_prediction() -> None:
    plan = planned(moe_model(), 3)
    reported = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert all({"item", "device", "bytes", "ms_per_token"} <= item.keys() for item in reported["items"])
    assert sum(item["bytes"] for item in reported["items"]) == sum(reported["bytes"].values())
    assert reported["prediction"]["decode_tokens_per_second"] == pytest.approx(1000 / plan.ms_per_token)
    assert len(reported["layers"]) == 48


def test_the_text_groups_layers_and_reports_repacking_cost() -> None:
    plan = replace(
        plan_memory(mixed_model(), cpu_only(), PLAN_OPTIONS), repacking=Repacking(200 * MIB, 0.25, True)
    )
    lines = plan.explain().splitlines()
    assert lines[2].split() == ["item", "on", "size", "ms", "FLOP/B", "bound", "by"]
    assert lines[3].startswith("layers 0-31 attention  ")
    assert len(lines) < 20
    assert len(plan.explain(details=True).splitlines()) > 96
    assert "repacked 200 MiB in 0.25 s (0.8 GB/s); the file's pages were released" in lines
    explained = replace(plan, repacking=Repacking(200 * MIB, 0.25, False)).explain()
    assert "the file's pages stay mapped" in explained
    nothing = replace(plan, repacking=Repacking(0, 0.0, False)).explain()
    assert "nothing was repacked: the weights are memory-mapped" in nothing


def test_a_pinned_ring_is_counted_unless_memory_is_pinned_in_place() -> None:
    machine = laptop()
    other = with_link(machine, pins_in_place=False)
    options = replace(PLAN_OPTIONS, vram=3 * GIB)
    plain, ring = (plan_memory(dense_model(), each, options) for each in (machine, other))
    assert ring.bytes_on("cpu") - plain.bytes_on("cpu") == STREAMED_PIECES * streamed_piece_bytes(
        dense_model()
    )
    assert ring.prediction == plain.prediction
