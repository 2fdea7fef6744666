"""Truncation under a constraint that checks as few tokens as possible."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling.candidates import Floats, Positions, highest

MAX_CHECKED = 48
"""Maximum number of tokens checked with the constraint; beyond it, computing all allowed tokens is faster."""
FIRST_CHECKED = 3
"""Number of top tokens that may be disallowed before the first allowed one."""


def allowed_shortlist(
    logits: npt.NDArray[np.float32],
    limit: int,
    truncate: Callable[[Floats], Positions],
    allows: Callable[[int], bool],
) -> npt.NDArray[np.int64] | None:
    """The allowed tokens that remain after `truncate`, rising; None: the check limit was reached.

    `truncate` keeps a prefix of at most `limit` tokens in falling order. The length of the prefix doesn't
    fall if lower tokens are added. It is therefore between the lengths for two lists: the allowed tokens
    found so far, and these with all unchecked tokens. If both are equal, no further token is checked.

    `logits` (V,) float32, the best of them finite. `allows`: whether a token is allowed.
    """
    order = highest(logits, limit)
    falling, ids = logits[order], order.tolist()
    allowed: list[int] = []
    checked = next_try = 0
    while checked < len(ids):
        if checked == MAX_CHECKED or (not allowed and checked == FIRST_CHECKED):
            return None
        if allows(ids[checked]):
            allowed.append(checked)
        checked += 1
        if not allowed or checked < min(next_try, len(ids)):
            continue
        longest = truncate(_upper_bound(falling, allowed, checked, logits.size)).size
        if longest > len(allowed):
            next_try = checked + longest - len(allowed)
        elif truncate(falling[allowed]).size == longest:
            return np.array(sorted(ids[position] for position in allowed[:longest]))
        else:
            next_try = 2 * checked
    return None


def _upper_bound(falling: Floats, allowed: list[int], checked: int, vocabulary: int) -> Floats:
    """The logits if all unchecked tokens are allowed. A disallowed token frees a place for the next-best
    token, which isn't in the list; its logit is at most the last one.
    """
    disallowed = checked - len(allowed) if falling.size < vocabulary else 0
    return np.concatenate([falling[allowed], falling[checked:], np.repeat(falling[-1:], disallowed)])
