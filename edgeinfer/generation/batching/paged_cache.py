"""The pages of an engine's cache: of live sequences, of idle prefixes, and of the engine's contiguous text.

A page has PAGE positions. The engine's text, whose page i is page i of the cache, is what the fast path of a
single sequence reads and writes; all other sequences have their pages anywhere.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.prefix_tree import Node, PrefixTree
from edgeinfer.generation.shared_prefix import CacheFullError
from edgeinfer.snapshots.spilled_pages import ROOT, SpilledPage, SpilledPages, page_key
from edgeinfer_kernels.backend import PAGE, BatchPositions

PAGES_PER_RUN = 4
"""Pages that a sequence takes together: the kernels read this many contiguous pages without a copy."""
PAGES_AHEAD = 32
"""Pages that are reserved for the engine's text after those that it needs now, if they are free."""
MAX_SHARE_AHEAD = 1 / 8
"""Idle prefixes are evicted in batches, because decoding stops for each batch: besides the missing pages
PAGES_AHEAD more, but at most this share of the cache, most of whose pages so keep prefixes if it is small.
"""


@dataclass(eq=False)
class PagedText:
    """The pages of a live sequence: whole pages in the tree, then pages without other users.

    `length`: positions that hold its tokens. `evicted`: as of `KVCache`; the keys and values after an evicted
    token aren't those of other texts with the same tokens, so their pages are never in the tree.
    """

    nodes: list[Node] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    length: int = 0
    evicted: list[tuple[int, int]] = field(default_factory=list)

    @property
    def shareable(self) -> int:
        """Number of first pages that may be in the tree."""
        return self.evicted[0][0] // PAGE if self.evicted else self.length // PAGE

    @property
    def pages(self) -> list[int]:
        """The cache pages in order."""
        return [*(node.page for node in self.nodes), *self.tail]


def pages_for(positions: int) -> int:
    """Pages for this number of positions."""
    return -(-positions // PAGE)


def next_positions(texts: Sequence[PagedText]) -> BatchPositions:
    """The positions after each sequence, which has a page for it; one that is there again has the next."""
    lengths, page_rows = {text: text.length for text in texts}, {text: text.pages for text in texts}
    positions = np.zeros(len(texts), np.int64)
    pages = np.zeros((len(texts), max(map(len, page_rows.values()))), np.int64)
    for row, text in enumerate(texts):
        positions[row] = lengths[text]
        pages[row, : len(page_rows[text])] = page_rows[text]
        lengths[text] += 1
    return BatchPositions(positions, pages)


def _never() -> bool:
    return False


class PagedCache:
    """Owns all pages of an engine's cache; a page without an owner is free, or one of the engine's text.

    `preempt` is called if no page can be evicted; it releases a live sequence's pages and returns whether it
    has done so.
    """

    def __init__(self, engine: NativeEngine, preempt: Callable[[], bool] = _never) -> None:
        self._engine, self._cache, self._preempt = engine, engine.cache, preempt
        self._tree = PrefixTree()
        self._owners: dict[int, Node | PagedText] = {}
        self._path: list[Node] = []
        """The nodes of the first pages of the engine's text; node i is page i."""
        self.total = pages_for(engine.positions)
        self._spilled = SpilledPages(engine.spill) if engine.spill.ram else None
        self._cache.shared = self._cache.reserved = 0
        self._cache.make_room = self._make_room

    @property
    def idle(self) -> int:
        """Number of pages in the tree, with those of live sequences."""
        return self._tree.pages

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free_from(self._end))

    @property
    def _end(self) -> int:
        """The end of the pages of the engine's text."""
        return min(self.total, self._cache.reserved // PAGE)

    def _free_from(self, first: int) -> list[int]:
        return [page for page in range(first, self.total) if page not in self._owners]

    def open(self, ids: Sequence[int]) -> PagedText:
        """A sequence with the longest stored prefix of `ids`, without their last token."""
        nodes = self._tree.match(ids, len(ids) - 1)
        self._tree.pin(nodes)
        if self._spilled is not None:
            nodes += self._read_back(ids, nodes)
        return PagedText(nodes, [], len(nodes) * PAGE)

    def _read_back(self, ids: Sequence[int], nodes: Sequence[Node]) -> list[Node]:
        """Read spilled pages that continue `nodes`, which are in use, back to the cache; their nodes, which
        are in use then, too.
        """
        assert self._spilled is not None
        found = list[SpilledPage]()
        for key in self._spilled_keys(ids, nodes):
            if (page := self._spilled.take(key)) is None:
                break
            found.append(page)
        try:
            pages = self._take(len(found))
        except CacheFullError:
            for page in found:
                self._spilled.keep(page)
            return []
        if found:
            self._engine.backend.write_pages(pages, [page.parts for page in found])
        added, parent = list[Node](), nodes[-1] if nodes else None
        for number, page in zip(pages, found, strict=True):
            parent = self._tree.insert(parent, page.tokens, number)
            self._owners[number] = parent
            self._tree.pin([parent])
            added.append(parent)
        return added

    def _spilled_keys(self, ids: Sequence[int], nodes: Sequence[Node]) -> list[bytes]:
        """The keys of the spilled pages of `ids`, without their last token, that continue `nodes`."""
        keys, key = list[bytes](), nodes[-1].key if nodes else ROOT
        for first in range(PAGE * len(nodes), len(ids) - PAGE, PAGE):
            key = page_key(key, ids[first : first + PAGE])
            if self._spilled is None or key not in self._spilled:
                break
            keys.append(key)
        return keys

    def extend(self, text: PagedText, ids: Sequence[int]) -> None:
        """Use pages that other sequences have added to the tree since `open`, or that have been spilled, if
        they continue this one.
        """
        if not text.tail:
            nodes = self._tree.match(ids, len(ids) - 1)[len(text.nodes) :]
            self._tree.pin(nodes)
            text.nodes += nodes
            if self._spilled is not None:
                text.nodes += self._read_back(ids, text.nodes)
            text.length = len(text.nodes) * PAGE

    def fork(self, text: PagedText) -> PagedText:
        """A sequence with the same tokens. Raises `CacheFullError`."""
        partial = text.length % PAGE
        tail = self._take(1) if partial else []
        if partial:
            source = text.pages[text.length // PAGE]
            self._engine.backend.copy_positions(source * PAGE, tail[0] * PAGE, partial)
        self._tree.pin(text.nodes)
        fork = PagedText(list(text.nodes), tail, text.length, list(text.evicted))
        self._own(fork, tail)
        return fork

    def reserve(self, text: PagedText, count: int) -> None:
        """Reserve pages for `count` more tokens. Raises `CacheFullError` before any change."""
        held = len(text.nodes) + len(text.tail)
        needed = pages_for(text.length + count) - held
        if needed <= 0:
            return
        self._free_up(needed)
        whole = needed + -(held + needed) % PAGES_PER_RUN
        pages = self._take(whole if self.free >= whole else needed)
        text.tail += pages
        self._own(text, pages)

    def register(self, text: PagedText, ids: Sequence[int]) -> None:
        """Add the whole pages of a sequence with these tokens to the tree."""
        first, whole = len(text.nodes), min(text.length // PAGE, text.shareable)
        for index in range(first, whole):
            page, parent = text.tail[index - first], text.nodes[-1] if text.nodes else None
            node = self._tree.insert(parent, ids[index * PAGE : (index + 1) * PAGE], page)
            if node.page == page:
                self._owners[page] = node
            else:  # another sequence has stored the same tokens
                del self._owners[page]
            self._tree.pin([node])
            text.nodes.append(node)
        del text.tail[: max(0, whole - first)]

    def release(self, text: PagedText, ids: Sequence[int]) -> None:
        """End a sequence with these tokens: its whole pages stay as an idle prefix, the others are free."""
        self.register(text, ids)
        self._tree.unpin(text.nodes)
        for page in text.tail:
            del self._owners[page]
        text.nodes, text.tail, text.length = [], [], 0

    def remember(self) -> None:
        """Add the whole pages of the engine's text to the tree."""
        self._drop_unshared()
        cache, path = self._cache, self._path
        end = len(cache.ids) if cache.first_evicted is None else cache.first_evicted
        for page in range(len(path), end // PAGE):
            tokens = cache.ids[page * PAGE : (page + 1) * PAGE]
            node = self._tree.insert(path[-1] if path else None, tokens, page)
            if node.page != page:  # the same tokens are stored in another page already
                if node.users:
                    break
                del self._owners[node.page]
                node.page = page
            self._owners[page] = node
            self._tree.pin([node])
            path.append(node)
        cache.shared = len(path) * PAGE

    def matched(self, ids: Sequence[int]) -> int:
        """The length of the longest stored prefix of `ids`, with spilled pages."""
        nodes = self._tree.match(ids, len(ids) - 1)
        return (len(nodes) + len(self._spilled_keys(ids, nodes))) * PAGE

    def store(self) -> None:
        """Make the engine's text an idle prefix; the engine then has no text."""
        self.remember()
        self._tree.unpin(self._path)
        self._path = []
        self._cache.rewind(0)
        self._cache.shared = self._cache.reserved = 0

    def detach(self, ids: Sequence[int]) -> PagedText:
        """The engine's text with these tokens as a sequence; the engine then has no text."""
        cache = self._cache
        self.remember()
        text = PagedText(self._path, [], len(cache.ids), list(cache.evicted))
        text.tail = list(range(len(self._path), pages_for(text.length)))
        self._own(text, text.tail)
        self._path = []
        cache.rewind(0)
        cache.shared = cache.reserved = 0
        self.register(text, ids)
        return text

    def attach(self, text: PagedText, ids: Sequence[int]) -> None:
        """Make a sequence with these tokens the engine's text, which is empty. Its pages move to the start
        of the cache.
        """
        self.register(text, ids)
        used = pages_for(text.length)
        for page in text.tail[used - len(text.nodes) :]:
            del self._owners[page]
        del text.tail[used - len(text.nodes) :]
        self._bring(text.pages)
        for page in text.tail:
            del self._owners[page]
        self._path = text.nodes
        self._cache.append(ids[: text.length])
        self._cache.evicted = list(text.evicted)
        self._cache.shared, self._cache.reserved = len(text.nodes) * PAGE, used * PAGE

    def _bring(self, pages: Sequence[int]) -> None:
        """Move these pages to the beginning of the cache, in order; pages there take their places."""
        content, place = dict[int, int](), dict[int, int]()
        for index, page in enumerate(pages):
            at, other = place.get(page, page), content.get(index, index)
            if at != index:
                content[index], place[page] = page, index
                content[at], place[other] = other, at
        moved = {source: at for at, source in content.items() if at != source}
        self._move({source: at for source, at in moved.items() if source in self._owners})

    def _move(self, targets: dict[int, int]) -> None:
        """Move owned pages; those at the targets move too, or are free."""
        if not targets:
            return
        self._engine.backend.copy_pages(list(targets), list(targets.values()))
        owners = {source: self._owners.pop(source) for source in targets}
        for text in {owner for owner in owners.values() if isinstance(owner, PagedText)}:
            text.tail = [targets.get(page, page) for page in text.tail]
        for source, owner in owners.items():
            self._owners[targets[source]] = owner
            if isinstance(owner, Node):
                owner.page = targets[source]

    def _own(self, text: PagedText, pages: Sequence[int]) -> None:
        self._owners.update(dict.fromkeys(pages, text))

    def _take(self, count: int) -> list[int]:
        """Free pages, the lowest ones. Raises `CacheFullError` as `_free_up`."""
        self._free_up(count)
        return self._free_from(self._end)[:count]

    def _free_up(self, count: int) -> None:
        """Evict idle prefixes if fewer than `count` pages are free.

        Raises:
            CacheFullError: even then there are too few.
        """
        missing = count - self.free
        if missing <= 0:
            return
        self._evict(missing + min(PAGES_AHEAD, int(self.total * MAX_SHARE_AHEAD)))
        if self.free < count:
            raise CacheFullError

    def _evict(self, count: int) -> None:
        """Free at most `count` pages of idle prefixes, the least recently used first, and spill them."""
        nodes = list[Node]()
        while len(nodes) < count and (node := self._tree.evict()) is not None:
            del self._owners[node.page]
            nodes.append(node)
        if nodes and self._spilled is not None:
            contents = self._engine.backend.read_pages([node.page for node in nodes])
            for node, parts in zip(nodes, contents, strict=True):
                self._spilled.keep(SpilledPage(node.before, node.tokens, parts))

    def _drop_unshared(self) -> None:
        """The engine's text no longer shares the pages from `cache.shared` on."""
        kept = self._cache.shared // PAGE
        self._tree.unpin(self._path[kept:])
        del self._path[kept:]

    def _make_room(self, end: int) -> None:
        """Reserve the first `end` positions for the engine's text, and some after them if they are free: move
        or evict what else is there. Only for the first ones live sequences give their pages up.
        """
        self._drop_unshared()
        needed = min(self.total, pages_for(end))
        more = needed - self._end
        while True:
            try:
                self._free_up(more)
            except CacheFullError:
                if not self._preempt():
                    raise
            else:
                break
        longest = min(self.total, pages_for(self._cache.context + self._cache.padding))
        last = needed + max(0, min(PAGES_AHEAD, longest - needed, self.free - more))
        occupied = [page for page in range(self._end, last) if page in self._owners]
        self._move(dict(zip(occupied, self._free_from(last), strict=False)))
        self._cache.reserved = sys.maxsize if last == self.total else last * PAGE
