"""Texts that are kept in main memory when an engine with one state gets another text."""

import numpy as np
import pytest

from edgeinfer.snapshots.memory_store import MemoryStore
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.spilled_pages import SpillBudget
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.generation.batching.live_engines import prompt


def snapshot(ids: list[int]) -> Snapshot:
    return Snapshot(ids, [np.array(ids, np.int64)])


def test_the_longest_prefix_is_found_and_the_least_recently_used_is_dropped() -> None:
    store = MemoryStore(5 * 8)
    for ids in ([1, 2, 3], [1, 5, 6], [7, 8]):
        assert store.keep(snapshot(ids))
    assert store.longest([1, 2, 3]) == (snapshot_of(store, [1, 5]), 1)
    store.keep(snapshot([9]))
    assert store.longest([7, 8]) is None
    found = store.longest([1, 5, 6, 7])
    assert found is not None
    assert (found[0].ids, found[1]) == ([1, 5, 6], 3)
    assert store.longest([1, 5, 6, 7], 3) is None


def snapshot_of(store: MemoryStore, ids: list[int]) -> Snapshot:
    found = store.longest(ids)
    assert found is not None
    return found[0]


def test_a_longer_text_replaces_its_prefixes_and_arrays_are_copied() -> None:
    store, array = MemoryStore(1000), np.arange(3)
    store.keep(Snapshot([1, 2], [array]))
    array[:] = 0
    assert snapshot_of(store, [1, 2]).arrays[0].tolist() == [0, 1, 2]
    store.keep(snapshot([1, 2, 3]))
    store.keep(snapshot([1, 2]))
    assert snapshot_of(store, [1, 2]).ids == [1, 2, 3]


def test_a_text_that_is_larger_than_the_limit_drops_no_other() -> None:
    store = MemoryStore(3 * 8)
    store.keep(snapshot([1, 2]))
    assert not store.keep(snapshot([5, 6, 7, 8]))
    assert store.nbytes == 2 * 8
    assert store.longest([1, 2]) is not None


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_alternating_chats_on_one_state_are_restored_from_main_memory(kept: int) -> None:
    engine = FakeEngine(seeded_logits, 1024)
    engine.spill = SpillBudget(kept)
    model = model_on(engine)
    texts = [prompt(100, seed) for seed in range(2)]
    for turn in range(6):
        text = texts[turn % 2]
        completion = model.generate(text, max_tokens=5, temperature=0.0)
        assert completion.ids == model_on(FakeEngine(seeded_logits, 1024)).generate(
            text, max_tokens=5, temperature=0.0
        ).ids  # fmt: skip
        if turn > 1:
            again = len(completion.prompt_ids) - completion.speed.cached_tokens
            assert again <= 4 if kept else again > 100
        texts[turn % 2] = [*text, *completion.ids, 9, 9]
