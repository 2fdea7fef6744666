"""Where loading does less than a plan shows, the plan is told with what loading does."""

from dataclasses import replace

from edgeinfer.planning import load_notes
from edgeinfer_offload.plan import plan_memory
from edgeinfer_offload.plan_facts import PlanWishes
from tests.offload.model_shapes import GIB, cpu_only, dense_model, laptop


def test_a_plan_that_loading_carries_out_needs_no_remark() -> None:
    for machine in (cpu_only(), laptop()):
        assert load_notes(plan_memory(dense_model(), machine, PlanWishes(8192))) == []


def test_what_loading_refuses_to_leave_on_the_disk_is_remarked_on() -> None:
    wishes = PlanWishes(8192, ram=4 * GIB, disk=True)
    plan = plan_memory(dense_model(), cpu_only(), wishes)
    assert plan.bytes_on("disk") > GIB
    assert load_notes(plan) == []
    assert load_notes(plan, 512) == ["loading refuses that: with a context of 512 all of it fits (--context)"]
    divided = plan_memory(dense_model(), laptop(), replace(wishes, ram=GIB, vram=2 * GIB))
    assert divided.head == "gpu"
    assert divided.bytes_on("disk") > GIB
    assert load_notes(divided) == []


def test_a_draft_alone_on_the_gpu_is_remarked_on() -> None:
    draft = dense_model(4, 1024, 4096, vocabulary=32000)
    whole = plan_memory(dense_model(), laptop(), PlanWishes(8192, draft=draft))
    assert load_notes(whole) == []
    divided = plan_memory(dense_model(), laptop(), PlanWishes(8192, draft=draft, vram=4 * GIB))
    assert (divided.draft, divided.head) == ("gpu", "gpu")
    assert load_notes(divided) == []
    alone = replace(divided, head="cpu")
    assert load_notes(alone) == ["loading keeps the draft of a model that is all on the CPU in main memory"]
