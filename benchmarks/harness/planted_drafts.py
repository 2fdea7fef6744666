"""A drafter whose guesses agree with the model as often as it is told, at the cost of a small model's passes.

Random weights say nothing that a smaller model could guess; so the answer is decoded plainly first, and the
drafter gives out its tokens, each spoilt with a set chance. For every token it reads one through the small
model, whose logits nobody looks at.
"""

import random
from collections.abc import Sequence

from edgeinfer.engine.protocols import Engine
from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft


class PlantedDrafter:
    """Guesses that stand with the chance `agreement`; `answer`: all ids of prompt and plain answer."""

    name = "planted"
    nbytes = 0

    def __init__(self, cost: Engine, answer: Sequence[int], agreement: float, seed: int = 1) -> None:
        self._cost = cost
        self._answer = list(answer)
        self._agreement = agreement
        self._random = random.Random(seed)

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """As many as asked for whose chance of being reached, agreement to the power, is worth it.

        A token that isn't worth its cost is read all the same, as a real draft must to know.
        """
        known = self._answer[len(history) :] if history[0] == self._answer[0] else self._answer
        ids: list[int] = []
        self._catch_up(len(history) - 1)
        for token in known[: len(least)]:
            read = history[-1] if not ids else ids[-1]
            self._cost.append([read % self._cost.vocabulary_size])
            if self._agreement ** (len(ids) + 1) < least[len(ids)]:
                break
            stands = self._random.random() < self._agreement
            ids.append(token if stands else (token + 1) % self._cost.vocabulary_size)
        return Draft(tuple(ids))

    def _catch_up(self, length: int) -> None:
        """A cache as long as the text, as a real draft would have."""
        held = len(self._cost.ids)
        if held > length:
            self._cost.rewind(length)
        elif held < length:
            self._cost.append([0] * (length - held))

    def close(self) -> None:
        """Nothing of its own."""
