"""Which pages of a cache have their positions in f16."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.caches.cache_formats import hadamard_rows
from edgeinfer_kernels.caches.layer_cache import LANES, LayerCache, by_position
from edgeinfer_kernels.caches.recent_pages import RECENT_STEP, RecentPages, recent_slots

HEAD_DIM, CONTEXT = 32, 400
RANDOM = np.random.default_rng(4)
Floats = npt.NDArray[np.float32]


def cache_with_text(count: int = CONTEXT) -> LayerCache:
    spec = AttentionSpec(4, 2, HEAD_DIM, 0.25, NormSpec("rms", 1e-5), None)
    cache = LayerCache.allocate(spec, CONTEXT, "q4_0").with_recent(1)
    keys, values = RANDOM.standard_normal((2, count, 2, HEAD_DIM)).astype(np.float32)
    cache.write(0, keys, values)
    return cache


def recent_of(cache: LayerCache, pages: RecentPages, page: int) -> tuple[Floats, Floats]:
    """The keys and values (heads, 16, head_dim) of a page in f16."""
    slot, recent = int(pages.table[page]), cache.recent
    assert recent is not None
    keys = by_position(recent.keys[:, slot : slot + 1])
    values = recent.values[:, slot * LANES : (slot + 1) * LANES]
    return hadamard_rows(keys), hadamard_rows(values.astype(np.float32))


def test_pages_without_a_slot_are_filled_from_the_cache() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(1))
    pages.touch(100, 1)
    keys, values = cache.read(112, HEAD_DIM)
    for page in (4, 5, 6):
        positions = slice(page * LANES, (page + 1) * LANES)
        for actual, expected in zip(recent_of(cache, pages, page), (keys, values), strict=True):
            np.testing.assert_allclose(actual, expected[:, positions], atol=4e-3)


def test_pages_that_a_step_begins_are_not_filled() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(1))
    pages.touch(0, 48)
    assert cache.recent is not None
    assert not cache.recent.keys.any()
    assert not cache.recent.values.any()


def test_a_rewind_of_the_last_pages_fills_nothing() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(1))
    for position in range(200):
        pages.touch(position, 1)
    assert cache.recent is not None
    for back in (190, 170, 145):
        pages.touch(back, 1)
    assert not cache.recent.keys.any()
    pages.touch(60, 1)
    assert cache.recent.keys.any()


def test_the_pages_that_a_prompt_has_left_are_the_first_to_lose_their_slots() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(2))
    pages.touch(320, 16)
    for start in range(0, 256, RECENT_STEP):
        pages.touch(start, RECENT_STEP)
    pages.touch(336, 1)
    assert cache.recent is not None
    assert not cache.recent.keys[:, pages.table[20]].any()


def test_copies_of_pages_have_what_their_sources_have_also_if_they_change_places() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(1))
    pages.touch(40, 1)
    before = [recent_of(cache, pages, page)[0].copy() for page in (1, 2)]
    pages.copy_pages([1, 2], [2, 1])
    for page, expected in zip((2, 1), before, strict=True):
        np.testing.assert_array_equal(recent_of(cache, pages, page)[0], expected)
    pages.copy(2 * LANES, 7 * LANES, 5)
    np.testing.assert_array_equal(recent_of(cache, pages, 7)[0], before[0])


def test_dropped_pages_are_read_again_after_the_cache_has_changed() -> None:
    cache = cache_with_text()
    pages = RecentPages([cache], 30, recent_slots(1))
    pages.touch(40, 1)
    cache.write(32, *RANDOM.standard_normal((2, 8, 2, HEAD_DIM)).astype(np.float32))
    pages.drop([2])
    pages.touch(40, 1)
    expected = cache.read(40, HEAD_DIM)[0][:, 32:]
    np.testing.assert_allclose(recent_of(cache, pages, 2)[0][:, :8], expected, atol=4e-3)


def test_a_batch_of_more_pages_than_there_are_has_no_recent_positions() -> None:
    pages = RecentPages([cache_with_text()], 30, recent_slots(1))
    positions = np.full(4, 40)
    shared = np.tile(np.arange(3), (4, 1))
    assert pages.touch_batch(positions, shared) is not None
    assert pages.touch_batch(positions, np.arange(12).reshape(4, 3)) is None


def test_a_longer_step_is_refused() -> None:
    with pytest.raises(ValueError, match="saw a step of 65 tokens, wanted 64 with recent positions"):
        RecentPages([cache_with_text()], 30, recent_slots(1)).touch(0, 65)
