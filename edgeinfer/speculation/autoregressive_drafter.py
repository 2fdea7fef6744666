"""What drafters have in common that guess token by token, each from logits behind the one before."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling import Sampler
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft


class AutoregressiveDrafter(ABC):
    """With a seed the guesses are the best tokens, so that the answer is what plain decoding gives for that
    seed; without one they are drawn, which lets more of them stand.

    `own_size`: the vocabulary of the logits that it guesses from; `vocabulary_size`: that of the model; ids
    beyond it are never guessed. `leaves`: tokens more that a draft may hold, each the next best at its place;
    drafts with leaves aren't drawn.
    """

    def __init__(self, own_size: int, vocabulary_size: int, leaves: int = 0) -> None:
        self.leaves = leaves
        self._own_size = own_size
        self._vocabulary_size = vocabulary_size
        self._sampler: Sampler | None = None
        self._settings: SamplerSettings | None = None
        """Those of the answer that `_sampler` is for."""
        self._room = np.empty(own_size, np.float32)

    @abstractmethod
    def _behind(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits behind a text, which may be written to; None: nothing can be guessed there."""

    @abstractmethod
    def _following(self, token: int) -> npt.NDArray[np.float32]:
        """Logits behind one more token."""

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """Token by token, until the next is too unlikely to be reached."""
        drawn = settings.temperature > 0 and settings.seed is None and not self.leaves
        sampler = self._sampler_for(settings)
        said, ids, distributions, reached = list(history), list[int](), list[Distribution](), 1.0
        words: list[float] = []
        others: list[tuple[int, float]] = []
        found = self._behind(said)
        if found is None:
            return Draft(())
        logits = found
        for place, needed in enumerate(least):
            logits[self._vocabulary_size :] = -np.inf
            before = reached
            if settings.temperature == 0:
                token = sampler.best(logits, said)
                words.append(self._share(logits, token))
            else:
                candidates, chances = sampler.distribution(logits, said)
                at = sampler.draw(chances) if drawn else int(chances.argmax())
                token = int(candidates[at])
                words.append(float(chances[at]) if len(chances) > 1 else self._share(logits, token))
                distributions.append((candidates, chances))
            reached *= words[-1]
            if reached < needed:
                break
            ids.append(token)
            if self.leaves:
                others.append(self._next_best(logits, token, before))
            said.append(ids[-1])
            if further and reached < further[place]:
                break
            if len(ids) < len(least):
                logits = self._following(ids[-1])
        drawn_from = tuple(distributions[: len(ids)]) if drawn else None
        return Draft(tuple(ids), drawn_from, self._likeliest(others), tuple(words[: len(ids)]))

    def _likeliest(self, others: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], ...]:
        """The `leaves` most likely of the next best tokens, each at its place."""
        taken = sorted(range(len(others)), key=lambda place: -others[place][1])[: self.leaves]
        return tuple((token,) if place in taken else () for place, (token, _) in enumerate(others))

    def _sampler_for(self, settings: SamplerSettings) -> Sampler:
        """Draws as the answer's own sampler would, from its own chances; Mirostat's memory is left out."""
        if self._sampler is None or self._settings is not settings:
            wanted = replace(settings, mirostat=0, seed=None, logit_bias=self._known(settings.logit_bias))
            if self._sampler is None or self._sampler.settings != wanted:
                self._sampler = Sampler(wanted, self._own_size)
            self._settings = settings
        return self._sampler

    def _known(self, bias: Mapping[int, float]) -> dict[int, float]:
        return {token: value for token, value in bias.items() if token < self._own_size}

    def _share(self, logits: npt.NDArray[np.float32], token_id: int) -> float:
        """The softmax of one logit: how sure a model is that has only one candidate left."""
        np.subtract(logits, logits[token_id], out=self._room)
        np.exp(self._room, out=self._room)
        return float(1 / self._room.sum())

    def _next_best(self, logits: npt.NDArray[np.float32], best: int, reached: float) -> tuple[int, float]:
        """The best token but one, and how likely it is to come where a draft gets so far."""
        self._room[:] = logits
        self._room[best] = -np.inf
        token = int(self._room.argmax())
        return token, reached * self._share(logits, token)
