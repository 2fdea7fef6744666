"""Top-k, top-p and min-p combined: takes tokens in falling order until one is excluded."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling.candidates import highest

MAX_ASKED = 48
"""Maximum number of tokens checked with the constraint; beyond it, computing all allowed tokens is faster."""
FIRST_ASKED = 3
"""Number of top tokens that may be disallowed before the first allowed one."""
MARGIN = 1e-5
"""Relative error of a sum of float32 weights due to rounding."""


class Shortlist:
    """The allowed tokens that remain after top-k, top-p and min-p, without computing all allowed tokens.

    Each of the three keeps a prefix of the allowed tokens in falling order. Top-p needs the weight of the
    `top_k` best allowed tokens. Its lower bound is the weight of those found so far; its upper bound assumes
    that all others are allowed. If the bounds don't decide, further tokens are checked.

    `logits` (n,) float32, the best of them finite. `allows`: whether a token (an index in `logits`) is
    allowed; None: all are.
    """

    def __init__(
        self, logits: npt.NDArray[np.float32], top_k: int, allows: Callable[[int], bool] | None = None
    ) -> None:
        order = highest(logits, top_k)
        self._falling = logits[order]
        self._ids: list[int] = order.tolist()
        self._logits: list[float] = self._falling.tolist()
        self._weights: list[float] = np.exp(self._falling - self._falling[0]).tolist()
        self._allows = allows
        weight = sum(self._weights)
        everything = allows is None
        self._asked = len(self._ids) if everything else 0
        self._allowed = list(range(self._asked))
        """Indices in falling order of logits."""
        self._known = weight if everything else 0.0
        """Weight of the allowed tokens."""
        self._rest = weight - self._known
        """Weight of the unchecked tokens."""

    def kept(self, top_p: float, min_p: float) -> npt.NDArray[np.int64] | None:
        """The remaining ids, rising; None: the result depends on rounding, or needs too many checks."""
        before, kept, floor = 0.0, 0, -math.inf
        while kept < len(self._allowed) or self._asked < len(self._ids):
            if kept == len(self._allowed):
                if self._logits[self._asked] < floor:
                    return self._first(kept)
                if not self._ask():
                    return None
                continue
            place = self._allowed[kept]
            if kept == 0:
                floor = self._floor(place, min_p)
            elif self._logits[place] < floor:
                return self._first(kept)
            elif top_p < 1 and before >= top_p * self._known * (1 - MARGIN):
                reached = self._reached(before, top_p)
                if reached is None:
                    return None
                if reached:
                    return self._first(kept)
            before += self._weights[place]
            kept += 1
        # A disallowed token frees a top-k place for the next-best token.
        return self._first(kept) if kept == len(self._ids) else None

    def _floor(self, best: int, min_p: float) -> float:
        """The lowest logit that min-p keeps, rounded as in `truncation.min_p`."""
        return float(np.float32(self._falling[best] + math.log(min_p))) if min_p > 0 else -math.inf

    def _reached(self, before: float, share: float) -> bool | None:
        """Whether the weight `before` is at least `share` of the `top_k` best allowed weights;
        None: unknown.
        """
        while before >= share * self._known * (1 - MARGIN):
            refused = self._asked - len(self._allowed)
            most = self._known + self._rest + refused * self._weights[-1]
            if before > share * most * (1 + MARGIN):
                return True
            if not self._ask():
                return None
        return False

    def _ask(self) -> bool:
        """Check the next token; False: there is none, or the limit is reached."""
        place, none = self._asked, not self._allowed
        if place in (MAX_ASKED, len(self._ids)) or (none and place == FIRST_ASKED) or not self._allows:
            return False
        weight = self._weights[place]
        if self._allows(self._ids[place]):
            self._allowed.append(place)
            self._known += weight
        self._rest = max(0.0, self._rest - weight)
        self._asked += 1
        return True

    def _first(self, count: int) -> npt.NDArray[np.int64]:
        return np.array(sorted(self._ids[place] for place in self._allowed[:count]))
