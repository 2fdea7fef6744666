"""Top-k, top-p and min-p in one: the likeliest tokens one by one, until one of them is left out."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling.candidates import highest

MAX_ASKED = 48
"""So many tokens are asked about at most; then it is quicker to look at all."""
FIRST_ASKED = 3
"""So many of the likeliest tokens may be refused before any is allowed."""
MARGIN = 1e-5
"""Share of a sum of float32 weights that rounding may change."""


class Shortlist:
    """The tokens that the three leave of the allowed, without knowing all of these.

    Each of the three leaves a beginning of the allowed tokens in falling order. What top-p compares with, the
    weight of the `top_k` best allowed, lies between the weight of those that were found so far and what it
    would be if all others were allowed; where that doesn't decide, further ones are asked about.

    `logits` (n,) float32, the best of them finite. `allows`: whether a token (a place in `logits`) is
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
        """Places in falling order."""
        self._known = weight if everything else 0.0
        """Weight of the allowed."""
        self._rest = weight - self._known
        """Weight of those that nobody asked about yet."""

    def kept(self, top_p: float, min_p: float) -> npt.NDArray[np.int64] | None:
        """The ids that stay, rising; None: rounding decides, or too many would have to be asked about."""
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
        # Where one was refused, another one that stands behind all of these takes its place.
        return self._first(kept) if kept == len(self._ids) else None

    def _floor(self, best: int, min_p: float) -> float:
        """The least logit that min-p leaves, rounded as `truncation.min_p` does."""
        return float(np.float32(self._falling[best] + math.log(min_p))) if min_p > 0 else -math.inf

    def _reached(self, before: float, share: float) -> bool | None:
        """Whether weights of this sum hold `share` of that of the `top_k` best allowed; None: unknown."""
        while before >= share * self._known * (1 - MARGIN):
            refused = self._asked - len(self._allowed)
            most = self._known + self._rest + refused * self._weights[-1]
            if before > share * most * (1 + MARGIN):
                return True
            if not self._ask():
                return None
        return False

    def _ask(self) -> bool:
        """Ask about the next one; False: there is none, or there have been enough."""
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
