"""A full cache evicts pages of idle prefixes in batches, and live sequences keep theirs if that suffices."""

import numpy as np
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.paged_cache import MAX_SHARE_AHEAD, PAGES_AHEAD, PagedCache, PagedText
from edgeinfer.snapshots.spilled_pages import SpillBudget
from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.decoder_state import PageParts
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.generation.batching.live_engines import engine_of, prompt

TOTAL = 64
AHEAD = 8
"""Pages that are evicted besides the missing ones in a cache of TOTAL pages."""
assert int(TOTAL * MAX_SHARE_AHEAD) == AHEAD < PAGES_AHEAD


class FullCache:
    """A cache of idle prefixes of `length` pages each, and the number of pages of each eviction."""

    def __init__(self, engine: NativeEngine, length: int = 4, live: int = 0) -> None:
        engine.spill = SpillBudget(1 << 30)
        self.engine, self.preempted = engine, 0
        self.cache = PagedCache(engine, self._preempt)
        self.evictions = list[int]()
        self._live: tuple[PagedText, list[int]] | None = None
        read_pages = engine.backend.read_pages

        def counted(pages: list[int]) -> list[PageParts]:
            self.evictions.append(len(pages))
            return read_pages(pages)

        engine.backend.read_pages = counted  # type: ignore[method-assign, assignment]
        if live:
            ids = prompt(live * PAGE, 1000)
            self._live = self.opened(ids), ids
        self.prefixes = [prompt(length * PAGE, seed) for seed in range(self.cache.free // length)]
        for ids in self.prefixes:
            self.cache.release(self.opened(ids), ids)
        assert self.cache.free < length
        assert not self.evictions

    def opened(self, ids: list[int]) -> PagedText:
        """A live sequence with pages for these tokens."""
        text = self.cache.open(ids)
        self.cache.reserve(text, len(ids) - text.length)
        text.length = len(ids)
        return text

    def _preempt(self) -> bool:
        self.preempted += 1
        if self._live is not None:
            self.cache.release(*self._live)
        found, self._live = self._live is not None, None
        return found

    def grow(self, tokens: int) -> None:
        """The engine's text gets further tokens, one by one."""
        held = self.engine.cache
        for token in prompt(tokens, 2000 + len(held.ids)):
            held.reserve(len(held.ids) + 1)
            held.append([token])


def full_cache(zoo_file: ZooFile, total: int = TOTAL, length: int = 4, live: int = 0) -> FullCache:
    positions = total * PAGE
    return FullCache(engine_of(zoo_file("llama"), positions=positions, context=positions), length, live)


def test_a_growing_text_evicts_many_pages_at_once(zoo_file: ZooFile) -> None:
    full = full_cache(zoo_file)
    full.grow(27 * PAGE)
    assert full.evictions == [1 + AHEAD] * 3
    full.grow(1)
    assert full.evictions == [1 + AHEAD] * 4
    assert full.cache.idle == TOTAL - sum(full.evictions)
    assert [full.cache.matched([*ids, 7]) for ids in full.prefixes] == list(map(len, full.prefixes))


def test_evicted_prefixes_are_read_back_with_what_they_held(zoo_file: ZooFile) -> None:
    full = full_cache(zoo_file)
    backend, rng = full.engine.backend, np.random.default_rng(0)
    of = {}
    for index, ids in enumerate(full.prefixes):
        text = full.cache.open([*ids, 7])
        contents = [
            [rng.integers(0, 100, part.nbytes).astype(np.uint8) for part in parts]
            for parts in backend.read_pages(text.pages)
        ]
        backend.write_pages(text.pages, contents)
        full.cache.release(text, ids)
        of[index] = contents
    full.grow(40 * PAGE)
    full.cache.store()
    for index, ids in enumerate(full.prefixes):
        text = full.cache.open([*ids, 7])
        assert text.length == len(ids)
        for parts, wanted in zip(backend.read_pages(text.pages), of[index], strict=True):
            for part, own in zip(parts, wanted, strict=True):
                np.testing.assert_array_equal(part, own)
        full.cache.release(text, ids)


def test_no_running_sequence_is_preempted_for_pages_ahead(zoo_file: ZooFile) -> None:
    full = full_cache(zoo_file, live=40)
    full.grow(24 * PAGE)
    assert full.preempted == 0
    assert full.cache.idle == full.cache.free == 0
    full.grow(1)
    assert full.preempted == 1


def test_sequences_that_grow_together_evict_many_pages_at_once(zoo_file: ZooFile) -> None:
    full = full_cache(zoo_file)
    texts = [full.opened(prompt(PAGE, 3000 + seed)) for seed in range(3)]
    full.evictions.clear()
    for _ in range(12 * PAGE):
        for text in texts:
            full.cache.reserve(text, 1)
            text.length += 1
    held = sum(len(text.pages) for text in texts)
    assert held >= 3 * 13
    assert min(full.evictions) == 1 + AHEAD
    assert sum(full.evictions) <= held + AHEAD
    assert full.preempted == 0


def test_a_text_reserves_no_pages_that_it_can_not_use(zoo_file: ZooFile) -> None:
    engine = engine_of(zoo_file("llama"), positions=TOTAL * PAGE, context=8 * PAGE)
    full = FullCache(engine)
    full.grow(8 * PAGE)
    assert engine.cache.reserved == 8 * PAGE


@pytest.mark.parametrize(("total", "at_once"), [(4, 1), (8, 2), (24, 4)])
def test_a_small_cache_keeps_most_idle_prefixes(zoo_file: ZooFile, total: int, at_once: int) -> None:
    full = full_cache(zoo_file, total, 1)
    full.grow(1)
    assert full.evictions == [at_once]
    assert full.cache.idle == total - at_once
    assert full.cache.idle >= (1 - MAX_SHARE_AHEAD) * total - 1
    full.grow((total - 1) * PAGE)
    assert full.cache.idle == 0
    assert sum(full.evictions) == total
