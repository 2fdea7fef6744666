"""A model of which memory holds only a part reads the rest ahead of each step, as the plan says."""

from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.options import LoadKeywords
from edgeinfer.planning import model_request
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_offload.machine import this_machine
from edgeinfer_offload.machine.host_memory import HostMemory
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import READ_AHEAD
from tests.kernels.system.marks import NEEDS_PREAD

DRAFT = Path(edgeinfer.__file__).parent / "builtin" / "edgeinfer-tiny-draft-5m-Q8_0.gguf"
MIB = 1 << 20
PROMPT = "Once upon a time, there was a little girl named Lily."


def limit_memory(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    """Let the machine have so much free memory, page cache included."""
    memory = HostMemory(64 << 30, mebibytes * MIB, mebibytes * MIB)
    monkeypatch.setattr(this_machine, "host_memory", lambda: memory)


def options(draft: Path | str | None) -> LoadKeywords:
    return LoadKeywords(device="cpu", threads=2, context=256, draft=draft, parallel=1, sparse="off")


def items(plan: MemoryPlan | None) -> dict[tuple[str, str], int]:
    assert plan is not None
    return {(item.item, item.device): item.bytes for item in plan.items}


def greedy(draft: Path | str | None) -> tuple[str, edgeinfer.Model]:
    with edgeinfer.load("tiny", **options(draft)) as model:
        return model.generate(PROMPT, max_tokens=40, temperature=0.0).text, model


@NEEDS_PREAD
def test_layers_on_disk_are_read_ahead_with_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, whole = greedy(None)
    assert whole.plan is not None
    assert not whole.plan.reads_ahead
    limit_memory(monkeypatch, 25)
    planned = plan_model("tiny", **options(None)).plan
    with edgeinfer.load("tiny", **options(None)) as model:
        assert items(model.plan) == items(planned)
        assert planned.reads_ahead
        assert planned.file_weight_bytes > 0
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, CpuBackend)
        stream = model.engine.backend.decoder.stream
        assert stream is not None
        assert stream.nbytes <= items(planned)[READ_AHEAD, "cpu"]
        assert model.generate(PROMPT, max_tokens=40, temperature=0.0).text == expected
        assert any("each token reads them from the disk" in warning for warning in model.warnings)
    assert "ahead of their use" in planned.explain()


@pytest.mark.slow
@NEEDS_PREAD
def test_a_requested_draft_model_is_in_memory_while_its_target_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = greedy(None)
    limit_memory(monkeypatch, 36)
    planned = plan_model("tiny", **options(DRAFT)).plan
    assert planned.reads_ahead
    assert planned.draft == "cpu"
    with edgeinfer.load("tiny", **options(DRAFT)) as model:
        assert items(model.plan) == items(planned)
        assert model.speculator is not None
        done = model.generate(PROMPT, max_tokens=40, temperature=0.0)
        assert done.text == expected
        assert done.speed.accepted_share is None or done.speed.accepted_share > 0


@NEEDS_PREAD
def test_an_automatic_draft_model_is_taken_if_the_plan_is_faster_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_memory(monkeypatch, 29)
    baseline, drafting, automatic = (
        plan_model("tiny", **options(draft)).plan for draft in (None, DRAFT, "auto")
    )
    assert baseline.reads_ahead
    cost = sum(item.ms_per_token for item in drafting.items if item.item == "draft model")
    is_faster = drafting.ms_per_token / 4 + cost < baseline.ms_per_token
    assert (automatic.draft == "cpu") == is_faster


@pytest.mark.slow
def test_a_system_that_can_not_read_ahead_maps_what_memory_does_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = greedy(None)
    limit_memory(monkeypatch, 22)
    monkeypatch.setattr(model_request, "can_read_directly", lambda: False)
    planned = plan_model("tiny", **options(None)).plan
    assert not planned.reads_ahead
    assert planned.rereads_file
    with edgeinfer.load("tiny", **options(None)) as model:
        assert items(model.plan) == items(planned)
        assert model.generate(PROMPT, max_tokens=40, temperature=0.0).text == expected
        assert any("memory-mapped" in warning for warning in model.warnings)
