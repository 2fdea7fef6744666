"""The draft type, and the drafter protocol."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings


class Draft(NamedTuple):
    """Draft tokens in order.

    `distributions`: those from which the tokens were sampled; None: not sampled, each is the drafter's only
    candidate.
    """

    ids: tuple[int, ...]
    distributions: tuple[Distribution, ...] | None = None
    others: tuple[tuple[int, ...], ...] = ()
    """For each of the tokens, or empty: its tree siblings. The draft is then a tree of one trunk and
    siblings; its tokens aren't sampled."""

    chances: tuple[float, ...] = ()
    """For each of the tokens, or empty: the drafter's probability, given the tokens before."""

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """(index, token) of all tree siblings, in processing order."""
        if not self.others:  # the usual case, and this is called several times per forward
            return []
        return [(place, token) for place, tokens in enumerate(self.others) for token in tokens]


class Drafter(Protocol):
    """Drafts the tokens after a history."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it uses."""
        ...

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """Draft at most len(least) tokens; empty if there is no draft. `least[i]`: the minimum probability of
        being reached, by the drafter's estimate, for token i to be verified. `further[i]`, if given: the
        minimum probability of token i for drafting another token after it.
        """
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...
