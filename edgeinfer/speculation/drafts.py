"""What a drafter proposes, and what every drafter offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings


@dataclass(frozen=True)
class Draft:
    """Guessed tokens, the nearest first.

    `distributions`: what each was drawn from; None: they were not drawn, each was its drafter's only guess.
    """

    ids: tuple[int, ...]
    distributions: tuple[Distribution, ...] | None = None


class Drafter(Protocol):
    """Guesses the tokens behind a history."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory."""
        ...

    def propose(self, history: Sequence[int], settings: SamplerSettings, least: Sequence[float]) -> Draft:
        """At most len(least) tokens; `least[i]` is the chance of being reached that token i must have to be
        worth its cost, by the drafter's own estimate. Nothing if there is nothing to guess.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...
