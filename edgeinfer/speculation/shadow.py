"""A draft that nobody reads: it only tells, from what comes anyway, whether drafts would stand."""

from collections.abc import Sequence

from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafts import Draft
from edgeinfer.speculation.verification import standing_chance


class Shadow:
    """The guesses behind one text, compared with its tokens one by one."""

    def __init__(self, history: Sequence[int], draft: Draft) -> None:
        self._history = history
        self._start = len(history)
        self._draft = draft

    def judge(self, history: Sequence[int], chosen: int, wanted: Distribution | None) -> float | None:
        """The chance that the guess for the place behind `history` would have stood.

        `wanted`: what the token that came, `chosen`, was drawn from, if that is known. None: there is no
        guess for this place.
        """
        place = len(history) - self._start
        if history is not self._history or not 0 <= place < len(self._draft.ids):
            return None
        guess, drawn_from = self._draft.ids[place], self._draft.distributions
        if chosen != guess:
            self._draft = Draft(self._draft.ids[: place + 1])  # what follows would have fallen with it
        if drawn_from is None or wanted is None:
            return float(chosen == guess)
        return standing_chance(guess, drawn_from[place], wanted)
