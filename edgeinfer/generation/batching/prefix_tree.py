"""The tree of cached prefixes: each node is a page of the cache, with the tokens that it holds."""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from edgeinfer.snapshots.spilled_pages import ROOT, page_key
from edgeinfer_kernels.backend import PAGE

MIN_LISTED = 64


class Node:
    """A page after the pages of its parents. `users`: the live sequences that need it."""

    __slots__ = ("before", "children", "key", "page", "parent", "tokens", "used", "users")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: "Node | None") -> None:
        self.tokens, self.page, self.parent = tokens, page, parent
        self.before: bytes = ROOT if parent is None else parent.key
        """The key of the page before it."""
        self.key: bytes = ROOT if parent is None else page_key(self.before, tokens)
        self.children: dict[tuple[int, ...], Node] = {}
        self.users = 0
        self.used = 0
        """When it was last in use, as a number of the tree's clock."""


class PrefixTree:
    """Whole pages of all sequences by their tokens, so that a common prefix is stored once.

    Pages without users stay until they are evicted, the least recently used first. A page is never evicted
    before those that continue it.
    """

    def __init__(self) -> None:
        self._root = Node((), -1, None)
        self._clock = count(1)
        self._idle: list[tuple[int, int, Node]] = []
        """A heap of (used, number, node): nodes that had neither users nor children; some have by now."""
        self.pages = 0
        """Number of pages in the tree."""

    def match(self, ids: Sequence[int], limit: int) -> list[Node]:
        """The nodes of the longest stored prefix of `ids` that has at most `limit` tokens."""
        node, path = self._root, list[Node]()
        for first in range(0, min(len(ids), limit) - PAGE + 1, PAGE):
            found = node.children.get(tuple(ids[first : first + PAGE]))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def insert(self, parent: Node | None, tokens: Sequence[int], page: int) -> Node:
        """The node of these tokens after `parent` (None: at the beginning): an existing one, or a new one
        with this page.
        """
        above = self._root if parent is None else parent
        key = tuple(tokens)
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = Node(key, page, above)
            self.pages += 1
            self._touch(node)
        return node

    def pin(self, nodes: Iterable[Node]) -> None:
        """Count a user of these nodes."""
        for node in nodes:
            node.users += 1

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Count a user less."""
        for node in reversed(nodes):  # children are evicted before their parents
            node.users -= 1
            self._touch(node)

    def evict(self) -> Node | None:
        """Remove the least recently used page that nothing needs, and return it. None: there is none."""
        while self._idle:
            entry = heappop(self._idle)
            node = entry[2]
            if not self._is_idle(entry) or node.parent is None:
                continue
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            self.pages -= 1
            if parent is not self._root:
                self._list(parent)
            return node
        return None

    def _touch(self, node: Node) -> None:
        node.used = next(self._clock)
        self._list(node)

    def _list(self, node: Node) -> None:
        """List a node that can be evicted."""
        if node.users or node.children:
            return
        heappush(self._idle, (node.used, next(self._clock), node))
        if len(self._idle) > 2 * self.pages + MIN_LISTED:
            newest = {entry[2]: entry for entry in self._idle if self._is_idle(entry)}
            self._idle = sorted(newest.values())

    @staticmethod
    def _is_idle(entry: tuple[int, int, Node]) -> bool:
        """Whether an entry of the heap still describes its node."""
        used, _, node = entry
        return not (node.users or node.children) and node.used == used and node.parent is not None
