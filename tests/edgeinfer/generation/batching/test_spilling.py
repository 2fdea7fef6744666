"""Idle prefixes that a full cache gives up: kept in main memory or on the disk, and read back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.snapshots.spilled_pages import ROOT, SpillBudget, SpilledPage, SpilledPages
from edgeinfer_kernels.backend import PAGE
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.generation.batching.live_engines import CONTEXT, Run, alone, engine_of, prompt, request
from tests.kernels.cpu.test_cpu_backend import cpu, exact

MIB = 1 << 20


def page(seed: int, before: bytes = ROOT) -> SpilledPage:
    rng = np.random.default_rng(seed)
    tokens = tuple(rng.integers(0, 1000, PAGE).tolist())
    parts = [rng.integers(0, 256, count).astype(np.uint8) for count in (8 * 2 * PAGE * 4, 8 * PAGE)]
    return SpilledPage(before, tokens, parts)


def assert_same(found: SpilledPage | None, wanted: SpilledPage) -> None:
    assert found is not None
    assert (found.before, found.tokens) == (wanted.before, wanted.tokens)
    for part, own in zip(found.parts, wanted.parts, strict=True):
        np.testing.assert_array_equal(part, own)


def chain(count: int, seed: int = 0) -> list[SpilledPage]:
    pages = [page(seed)]
    for index in range(1, count):
        pages.append(page(seed + index, pages[-1].key))
    return pages


def test_the_least_recently_used_pages_leave_main_memory(tmp_path: Path) -> None:
    pages = [page(seed) for seed in range(4)]
    spilled = SpilledPages(SpillBudget(3 * pages[0].nbytes), tmp_path)
    for each in pages:
        spilled.keep(each)
    assert [each.key in spilled for each in pages] == [False, True, True, True]
    assert spilled.ram_bytes == 3 * pages[0].nbytes
    assert_same(spilled.take(pages[2].key), pages[2])
    assert spilled.take(pages[2].key) is None
    assert spilled.ram_bytes == 2 * pages[0].nbytes
    assert not list(tmp_path.rglob("*.kv"))


def test_pages_go_to_the_disk_with_those_before_them_and_come_back(tmp_path: Path) -> None:
    pages = chain(6)
    spilled = SpilledPages(SpillBudget(4 * pages[0].nbytes, MIB), tmp_path)
    for each in reversed(pages):  # the last ones of a text are evicted first
        spilled.keep(each)
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    assert spilled.disk_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    for each in pages:
        assert_same(spilled.take(each.key), each)


def test_the_disk_budget_drops_the_oldest_files(tmp_path: Path) -> None:
    spilled = SpilledPages(SpillBudget(0, 4000), tmp_path)
    pages = [page(seed) for seed in range(5)]
    for each in pages:
        spilled.keep(each)
    assert spilled.disk_bytes <= 4000
    assert [each.key in spilled for each in pages] == [False, False, False, True, True]
    assert len(list(tmp_path.rglob("*.kv"))) == 2


def test_a_damaged_file_is_dropped_and_the_tokens_are_read_again(tmp_path: Path) -> None:
    spilled, kept = SpilledPages(SpillBudget(0, MIB), tmp_path), page(1)
    spilled.keep(kept)
    (path,) = tmp_path.rglob("*.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert spilled.take(kept.key) is None
    assert kept.key not in spilled
    assert "digest" in str(spilled.last_error)
    assert not path.exists()


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    spilled, kept = SpilledPages(SpillBudget(0, MIB), tmp_path / "file"), page(1)
    spilled.keep(kept)
    assert kept.key not in spilled
    assert spilled.last_error


BUDGETS = {"memory": SpillBudget(64 * MIB), "disk": SpillBudget(1, 64 * MIB)}


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("model", ["llama", "deepseek2"])
@pytest.mark.parametrize("build", [exact, cpu()], ids=["reference", "cpu"])
def test_two_chats_alternate_in_a_cache_that_holds_one(
    zoo_file: ZooFile, build: Any, model: str, budget: str
) -> None:
    engine = engine_of(zoo_file(model), build)
    engine.spill = BUDGETS[budget]
    run = Run(engine)
    texts = [prompt(75), prompt(75, 1)]
    for turn in range(6):
        text = texts[turn % 2]
        asked = request([*text, 7], 6)
        live = run.add(asked)
        ids = run.finish()[-1]
        assert ids == alone(zoo_file(model), [asked], build)[0]
        if turn > 1:
            assert live.timer.cached_tokens >= (len(text) - 7) // PAGE * PAGE
        text[:] = [*text, 7, *ids][:110]


def test_without_a_budget_such_chats_are_read_again(zoo_file: ZooFile) -> None:
    run = Run(engine_of(zoo_file("llama")))
    for turn in range(4):
        live = run.add(request(prompt(100, turn % 2), 4))
        run.finish()
        assert live.timer.cached_tokens < PAGE + (CONTEXT - 100)


@pytest.mark.slow
def test_spilled_prefixes_serve_requests_that_run_together(zoo_file: ZooFile) -> None:
    engine = engine_of(zoo_file("llama"), positions=2 * CONTEXT)
    engine.spill = BUDGETS["memory"]
    run = Run(engine)
    for seed in range(4):
        run.add(request(prompt(90, seed), 4))
    run.finish()
    requests = [request([*prompt(90, seed), 5], 12) for seed in range(4)]
    again = [run.add(each) for each in requests]
    assert run.finish()[4:] == alone(zoo_file("llama"), requests)
    assert sum(live.timer.cached_tokens >= 80 for live in again) >= 2
    assert isinstance(run.scheduler.requests, PagedRequests)
    cache = run.scheduler.requests.cache
    cache.store()
    assert cache.free + cache.idle == cache.total


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model", ["lfm2", "qwen35", "gemma3"])
def test_chats_beyond_the_states_are_restored_from_main_memory(zoo_file: ZooFile, model: str) -> None:
    engine = engine_of(zoo_file(model), cpu(), others=1)
    engine.spill = BUDGETS["memory"]
    run = Run(engine)
    texts = [prompt(70, seed) for seed in range(3)]
    for turn in range(6):
        text = texts[turn % 3]
        asked = request([*text, 7], 6)
        live = run.add(asked)
        ids = run.finish()[-1]
        assert ids == alone(zoo_file(model), [asked], cpu())[0]
        if turn > 2:
            assert len(text) + 1 - live.timer.cached_tokens <= 16
        text += [7, *ids]


def engine_in(model: Model) -> NativeEngine:
    assert isinstance(model.engine, NativeEngine)
    return model.engine


def test_a_model_takes_the_budgets_of_its_options(zoo_file: ZooFile) -> None:
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "context": CONTEXT, "draft": None}
    with edgeinfer.load(zoo_file("llama"), **options) as model:
        assert engine_in(model).spill == SpillBudget()
    with edgeinfer.load(zoo_file("llama"), **options, spill="3MiB", spill_disk="2MiB") as model:
        assert engine_in(model).spill == SpillBudget(3 * MIB, 2 * MIB)
    with edgeinfer.load(zoo_file("llama"), **options, parallel=2) as model:
        assert model.plan is not None
        assert 0 < engine_in(model).spill.ram <= 4 * model.plan.cache_bytes
