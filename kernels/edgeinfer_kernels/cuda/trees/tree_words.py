"""The positions and masks of a step whose tokens are a tree: each attends to the tokens before it.

Keys and values of the tokens are in their order after the text, so the position of a token isn't that of its
row in the cache; `PathSteps` moves those of the accepted path.
"""

from collections.abc import Sequence

TEXT_END = -1
"""As the row before a token: the last one of the text."""


def tree_rows(parents: Sequence[int]) -> list[int]:
    """For each row of a step the one before it. The first row is the token after which the tree begins;
    `parents`: as in `Backend.forward_tree`.
    """
    return [TEXT_END, *(parent + 1 for parent in parents)]


def tree_places(start: int, before: Sequence[int]) -> tuple[list[int], list[int]]:
    """Positions and masks (bit j: it attends to row j) of the rows of a step after the first `start`
    positions. `before`: the row before each, TEXT_END: none.
    """
    positions, masks = list[int](), list[int]()
    for row, earlier in enumerate(before):
        positions.append(start if earlier == TEXT_END else positions[earlier] + 1)
        masks.append(1 << row | (0 if earlier == TEXT_END else masks[earlier]))
    return positions, masks
