"""Where loading does less than a plan shows, the plan is told with what loading does."""

from dataclasses import replace

import pytest

from edgeinfer.planning import load_notes
from edgeinfer_kernels.model_sizes import ModelSizes
from edgeinfer_offload.memory_plan import PlanWishes
from edgeinfer_offload.plan import plan_memory
from tests.offload.model_shapes import GIB, cpu_only, dense_model, laptop, mixture_model


@pytest.mark.parametrize("sizes", [dense_model(), mixture_model()], ids=["dense", "mixture"])
def test_a_plan_that_sends_weights_for_a_prompt_tells_what_loading_does_instead(sizes: ModelSizes) -> None:
    plan = plan_memory(sizes, laptop(), PlanWishes(8192, vram=3 * GIB))
    (note,) = load_notes(sizes, plan)
    start = "loading doesn't send weights to the GPU for a prompt yet: expect "
    assert note.startswith(start)
    instead = float(note.removeprefix(start).split()[0])
    assert 0 < instead < plan.prediction.prefill_tokens_per_second
    assert load_notes(sizes, plan_memory(sizes, laptop(), replace(plan.wishes, streams=False))) == []


def test_a_plan_that_loading_carries_out_needs_no_remark() -> None:
    for machine in (cpu_only(), laptop()):
        assert load_notes(dense_model(), plan_memory(dense_model(), machine, PlanWishes(8192))) == []


def test_weights_on_the_disk_and_drafts_on_the_gpu_are_remarked_on() -> None:
    wishes = PlanWishes(8192, ram=4 * GIB, disk=True)
    assert load_notes(dense_model(), plan_memory(dense_model(), cpu_only(), wishes))[0] == (
        "loading keeps weights out of main memory with --no-repack only, then all of them"
    )
    draft = dense_model(4, 1024, 4096, vocabulary=32000)
    whole = plan_memory(dense_model(), laptop(), PlanWishes(8192, draft=draft))
    assert load_notes(dense_model(), whole) == []
    divided = plan_memory(dense_model(), laptop(), PlanWishes(8192, draft=draft, vram=4 * GIB))
    assert divided.draft == "gpu"
    told = "loading keeps the draft of a divided model in main memory yet"
    assert told in load_notes(dense_model(), divided)
