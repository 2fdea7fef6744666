"""Merges adjacent symbols in order of priority."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush


def merge(symbols: Sequence[str], priorities: Mapping[str, float], joint: str) -> list[str]:
    """Return `symbols` after all merges, in O(n log n).

    The pair (left, right) has the priority `priorities[left + joint + right]`, lowest first, leftmost
    first among equals; a pair without one is not merged. Byte-pair merges join with a space and rank by
    position in the list of merges; SentencePiece joins with nothing and ranks by falling score.

    Source: Sennrich et al. 2016 (section 3.2); Kudo and Richardson 2018 (section 3.1, the bigram queue).
    """
    merged = list(symbols)
    count = len(merged)
    following = list(range(1, count + 1))
    preceding = list(range(-1, count - 1))
    look_up = priorities.get
    queue: list[tuple[float, int, int]] = []
    for left in range(count - 1):
        if (priority := look_up(merged[left] + joint + merged[left + 1])) is not None:
            queue.append((priority, left, len(merged[left]) + len(merged[left + 1])))
    heapify(queue)
    while queue:
        _, left, length = heappop(queue)
        right = following[left]
        # A symbol only grows or becomes empty, so a pair of another length is outdated.
        if not merged[left] or right == count or len(merged[left]) + len(merged[right]) != length:
            continue
        merged[left] += merged[right]
        merged[right] = ""
        after = following[left] = following[right]
        if after != count:
            preceding[after] = left
            if (priority := look_up(merged[left] + joint + merged[after])) is not None:
                heappush(queue, (priority, left, length + len(merged[after])))
        before = preceding[left]
        if before >= 0 and (priority := look_up(merged[before] + joint + merged[left])) is not None:
            heappush(queue, (priority, before, length + len(merged[before])))
    return [symbol for symbol in merged if symbol]
