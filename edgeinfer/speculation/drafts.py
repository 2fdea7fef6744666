"""What a drafter proposes, and what every drafter offers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings


class Draft(NamedTuple):
    """Guessed tokens, the nearest first.

    `distributions`: what each was drawn from; None: they were not drawn, each was its drafter's only guess.
    """

    ids: tuple[int, ...]
    distributions: tuple[Distribution, ...] | None = None
    others: tuple[tuple[int, ...], ...] = ()
    """For each of the tokens, or for none: what may stand there in its place. A tree of one long branch and
    leaves beside it; its tokens aren't drawn.
    """

    chances: tuple[float, ...] = ()
    """For each of the tokens, or for none: how likely its drafter thought it, the ones before given."""

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """(place, token) of all that is beside the long branch, in the order in which it is read."""
        if not self.others:  # as nearly always, and this is asked for several times a pass
            return []
        return [(place, token) for place, tokens in enumerate(self.others) for token in tokens]


class Drafter(Protocol):
    """Guesses the tokens behind a history."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory."""
        ...

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """At most len(least) tokens; `least[i]` is the chance of being reached that token i must have to be
        read, by the drafter's own estimate; `further[i]`, if given, the chance that token i must have for
        another guess to be worth making behind it. Nothing if there is nothing to guess.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...
