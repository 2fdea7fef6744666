"""Grows a draft tree: the tokens that are most likely to be reached, by their joint probability.

Source: Li et al. 2024, "EAGLE-2" (arXiv:2406.16858), section 4.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling import Sampler
from edgeinfer.speculation.drafter import Draft, DraftRequest

ROOT = -1
"""As a token's index: the last token of the text."""
Floats = npt.NDArray[np.float32]
Candidates = list[tuple[int, float]]
"""Tokens and their probabilities, falling."""


class TreeGrowth:
    """A tree that grows level by level. `width`: the number of candidates after each token.

    The tokens of the draft are the `max_nodes` with the largest joint probabilities, those of a token and of
    all before it; the ones before a token are kept with it, as their probabilities are at least as large.
    """

    def __init__(self, request: DraftRequest, width: int) -> None:
        self._request, self._width = request, width
        self._max_nodes = request.max_nodes or request.max_tokens
        self.ids = list[int]()
        self.parents = list[int]()
        self._probs = list[float]()
        self._joint = list[float]()
        self._level: list[int] = []

    def path(self, node: int) -> list[int]:
        """The tokens from the first level to a node."""
        path = list[int]()
        while node != ROOT:
            path.append(self.ids[node])
            node = self.parents[node]
        return path[::-1]

    def begin_level(self) -> None:
        """The tokens that are added from now on are the next level."""
        self._level = []

    def add(self, parent: int, candidates: Candidates) -> None:
        """Add the candidates after a node that are likely enough to be verified."""
        before = 1.0 if parent == ROOT else self._joint[parent]
        for token, prob in candidates[: self._width]:
            joint = before * prob
            if joint > 0 and joint >= self._request.min_prob:  # False for a NaN
                self._level.append(len(self.ids))
                self.ids.append(token)
                self.parents.append(parent)
                self._probs.append(prob)
                self._joint.append(joint)

    def frontier(self, count: int) -> list[int]:
        """The nodes of the last level that are worth a next one, the most probable first; `count` at most."""
        kept = set(self._best())
        worth = [
            node
            for node in self._level
            if node in kept and self._joint[node] >= self._request.min_prob_to_continue
        ]
        return sorted(worth, key=lambda node: -self._joint[node])[:count]

    def draft(self) -> Draft:
        """The tree as a draft, a chain if no token has two after it."""
        kept = self._best()
        index = {node: at for at, node in enumerate(kept)} | {ROOT: ROOT}
        parents = tuple(index[self.parents[node]] for node in kept)
        is_chain = parents == tuple(range(-1, len(parents) - 1))
        ids, probs = [self.ids[node] for node in kept], [self._probs[node] for node in kept]
        return Draft(tuple(ids), None, () if is_chain else parents, tuple(probs))

    def _best(self) -> list[int]:
        """The `max_nodes` nodes that are most likely to be reached, falling; of equal ones the first."""
        return sorted(range(len(self.ids)), key=lambda node: -self._joint[node])[: self._max_nodes]


def grow_levels(request: DraftRequest, width: int, levels: Iterable[Candidates]) -> Draft:
    """The draft of levels whose candidates don't depend on the tokens before them."""
    growth, nodes = TreeGrowth(request, width), [ROOT]
    for found in levels:
        growth.begin_level()
        for node in nodes:
            growth.add(node, found)
        nodes = growth.frontier(width)
        if not nodes:
            break
    return growth.draft()


def candidates(
    sampler: Sampler, logits: Floats, text: Sequence[int], count: int, sharpness: float = 1.0
) -> Candidates:
    """The `count` most probable tokens after a text, as a completion with these settings samples them, with
    their probabilities to the power of `sharpness`, normalized.
    """
    if sampler.settings.temperature > 0:
        ids, probs = sampler.distribution(logits, text)
        weights = probs**sharpness
        return _largest(ids, weights / weights.sum(), count)
    adjusted = sampler.adjusted(logits, text)
    best = np.argpartition(adjusted, -min(count, len(adjusted)))[-count:]
    weights = np.exp(np.float32(sharpness) * (adjusted - adjusted[best].max()))
    return _largest(best, weights[best] / weights.sum(dtype=np.float64), count)


def _largest(ids: npt.NDArray[np.integer], probs: npt.NDArray[np.floating], count: int) -> Candidates:
    order = np.argsort(-probs, kind="stable")[:count]
    return list(zip(ids[order].tolist(), probs[order].tolist(), strict=True))
