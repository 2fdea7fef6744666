"""The base of drafters that draft token by token, each from the logits after the previous one."""

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
    """With a seed, draft tokens are the most probable ones, so that the result equals baseline decoding with
    that seed. Without a seed they are sampled, which raises acceptance.

    `own_size`: vocabulary size of the drafter's logits; `vocabulary_size`: that of the target; higher ids are
    never drafted. `leaves`: number of tree siblings that a draft may have, each the next-best token at its
    position; drafts with siblings aren't sampled.
    """

    def __init__(self, own_size: int, vocabulary_size: int, leaves: int = 0) -> None:
        self.leaves = leaves
        self._own_size = own_size
        self._vocabulary_size = vocabulary_size
        self._sampler: Sampler | None = None
        self._settings: SamplerSettings | None = None
        """The settings that `_sampler` was made for."""
        self._room = np.empty(own_size, np.float32)

    @abstractmethod
    def _behind(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after a text, writable; None: no draft is possible."""

    @abstractmethod
    def _following(self, token: int) -> npt.NDArray[np.float32]:
        """Logits after one more token."""

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """Draft token by token, until the next is too unlikely to be reached."""
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
        """The `leaves` most probable next-best tokens, each at its position."""
        taken = sorted(range(len(others)), key=lambda place: -others[place][1])[: self.leaves]
        return tuple((token,) if place in taken else () for place, (token, _) in enumerate(others))

    def _sampler_for(self, settings: SamplerSettings) -> Sampler:
        """A sampler with the completion's settings but separate uniforms; without the Mirostat state."""
        if self._sampler is None or self._settings is not settings:
            wanted = replace(settings, mirostat=0, seed=None, logit_bias=self._known(settings.logit_bias))
            if self._sampler is None or self._sampler.settings != wanted:
                self._sampler = Sampler(wanted, self._own_size)
            self._settings = settings
        return self._sampler

    def _known(self, bias: Mapping[int, float]) -> dict[int, float]:
        return {token: value for token, value in bias.items() if token < self._own_size}

    def _share(self, logits: npt.NDArray[np.float32], token_id: int) -> float:
        """The softmax of one logit: the model's confidence if only one candidate remains."""
        np.subtract(logits, logits[token_id], out=self._room)
        np.exp(self._room, out=self._room)
        return float(1 / self._room.sum())

    def _next_best(self, logits: npt.NDArray[np.float32], best: int, reached: float) -> tuple[int, float]:
        """The second-best token, and its probability, given that the draft reaches this position."""
        self._room[:] = logits
        self._room[best] = -np.inf
        token = int(self._room.argmax())
        return token, reached * self._share(logits, token)
