"""The tree of prefixes: what it finds, and in which order it evicts."""

from edgeinfer.generation.batching.prefix_tree import MIN_LISTED, Node, PrefixTree
from edgeinfer.snapshots.spilled_pages import ROOT, page_key
from edgeinfer_kernels.backend import PAGE


def stored(tree: PrefixTree, ids: list[int], first_page: int) -> list[Node]:
    """The nodes of whole pages of `ids`, without users."""
    nodes: list[Node] = []
    for index in range(len(ids) // PAGE):
        tokens = ids[index * PAGE : (index + 1) * PAGE]
        nodes.append(tree.insert(nodes[-1] if nodes else None, tokens, first_page + index))
    return nodes


def evicted(tree: PrefixTree, count: int) -> list[int | None]:
    """The pages that are evicted next."""
    nodes = [tree.evict() for _ in range(count)]
    return [None if node is None else node.page for node in nodes]


def text(*firsts: int) -> list[int]:
    """Ids whose pages each begin with a number of `firsts`."""
    return [first + index for first in firsts for index in range(PAGE)]


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    tree = PrefixTree()
    nodes = stored(tree, text(10, 20, 30), 0)
    assert tree.match([*text(10, 20), 1, 2, 3], 100) == nodes[:2]
    assert tree.match(text(10, 20, 30), 3 * PAGE) == nodes
    assert tree.match(text(10, 20, 30), 3 * PAGE - 1) == nodes[:2]
    assert tree.match(text(20, 30), 100) == []


def test_equal_pages_after_different_pages_are_not_shared() -> None:
    tree = PrefixTree()
    first, second = stored(tree, text(10, 99), 0), stored(tree, text(20, 99), 2)
    assert first[1] is not second[1]
    assert stored(tree, text(10, 99), 8) == first
    assert tree.pages == 4


def test_the_least_recently_used_page_is_evicted_first_and_never_before_its_continuations() -> None:
    tree = PrefixTree()
    old, new = stored(tree, text(10, 11), 0), stored(tree, text(20, 21), 2)
    for nodes in (new, old):  # used in this order
        tree.pin(nodes)
        tree.unpin(nodes)
    assert evicted(tree, 5) == [3, 2, 1, 0, None]
    assert tree.pages == 0
    assert tree.match(text(10, 11), 100) == []


def test_a_page_in_use_is_not_evicted() -> None:
    tree = PrefixTree()
    nodes = stored(tree, text(10, 11, 12), 0)
    tree.pin(nodes[:2])
    assert evicted(tree, 2) == [2, None]
    tree.unpin(nodes[:2])
    assert evicted(tree, 3) == [1, 0, None]


def test_pages_that_are_used_often_are_evicted_last() -> None:
    tree = PrefixTree()
    often, others = stored(tree, text(10), 0), [stored(tree, text(20 + i), 1 + i) for i in range(3)]
    for nodes in others * (2 * MIN_LISTED):
        for each in (nodes, often):
            tree.pin(each)
            tree.unpin(each)
    assert evicted(tree, 5) == [1, 2, 3, 0, None]


def test_an_evicted_page_has_the_key_of_its_tokens_and_of_those_before() -> None:
    tree = PrefixTree()
    first, second = stored(tree, text(10, 20), 0)
    assert (first.before, second.before) == (ROOT, first.key)
    assert (first.key, second.key) == (page_key(ROOT, text(10)), page_key(first.key, text(20)))
    assert stored(tree, text(30, 20), 2)[1].key != second.key
