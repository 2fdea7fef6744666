"""What a backend is asked that guesses several tokens in one piece, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DraftSampling:
    """How a token is chosen from logits. temperature 0: the best one; otherwise from what top-k (0: all),
    top-p and min-p leave, in this order, by the softmax of logits / temperature.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class DraftRequest(NamedTuple):
    """What guesses are asked for, len(least) at most.

    They end before a guess i whose chance of being reached, the product of its own and those before, is below
    least[i], or behind one whose chance is below further[i], if that is given. `choices`: the first so many
    tokens may be guessed. `numbers`: none, or one from 0 to 1 for each guess, which is drawn with it; without
    them the best token is guessed.
    """

    least: Sequence[float]
    further: Sequence[float]
    choices: int
    manner: DraftSampling
    numbers: Sequence[float] = ()


class DraftedTokens(NamedTuple):
    """Tokens in a row, each with its chance where it stands, float32.

    `read`: how many tokens have been read, those that were given among them; the last guess isn't unless
    another one fell short behind it. `candidates`: for each guess the ids that it was drawn from, rising,
    and their weights (float32); empty where nothing was drawn.
    """

    ids: list[int]
    chances: list[float]
    read: int
    candidates: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]], ...] = ()


@runtime_checkable
class DraftingBackend(Protocol):
    """A backend that goes from token to token by itself."""

    @property
    def most_given(self) -> int:
        """Tokens that it reads before a first guess, at most; 0: it can't guess with this model."""
        ...

    def guesses(self, ids: Sequence[int], start: int, wanted: DraftRequest) -> DraftedTokens:
        """Read `ids` at positions start…, then guess and read on; it ends where no logit is a finite number.

        A backend may draw from fewer candidates than the manner leaves, and says so.
        """
        ...
