"""Guesses by a smaller model of the same vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.kv_cache import shared_prefix
from edgeinfer.language_model import Engine
from edgeinfer.sampling import Sampler
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft


def _share(logits: npt.NDArray[np.float32], token_id: int) -> float:
    """The softmax of one logit: how sure a model is that has only one candidate left."""
    return float(1 / np.exp(logits - logits[token_id]).sum())


def _next_best(logits: npt.NDArray[np.float32], best: int, reached: float) -> tuple[int, float]:
    """The best token but one, and how likely it is to come where a draft gets so far."""
    without = logits.copy()
    without[best] = -np.inf
    token = int(without.argmax())
    return token, reached * _share(logits, token)


class DraftModel:
    """A small engine with a cache of its own, which follows the text that the large one writes.

    With a seed the guesses are the draft's best tokens, so that the answer is what plain decoding gives for
    that seed; without one they are drawn, which lets more of them stand. `vocabulary_size`: that of the large
    model; ids beyond it are never guessed. `leaves`: tokens more that a draft may hold, each the next best
    at its place; drafts with leaves aren't drawn.
    """

    name = "draft model"

    def __init__(
        self,
        engine: Engine,
        vocabulary_size: int,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        leaves: int = 0,
    ) -> None:
        self.leaves = leaves
        self._engine = engine
        self._on_close = on_close
        self._vocabulary_size = vocabulary_size
        self._nbytes = nbytes
        self._sampler: Sampler | None = None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def propose(self, history: Sequence[int], settings: SamplerSettings, least: Sequence[float]) -> Draft:
        """Token by token, until the next is too unlikely to be reached."""
        if len(history) + len(least) > self._engine.context:
            return Draft(())
        drawn = settings.temperature > 0 and settings.seed is None and not self.leaves
        sampler = self._sampler_for(settings)
        said, ids, distributions, reached = list(history), list[int](), list[Distribution](), 1.0
        others: list[tuple[int, float]] = []
        logits = self._catch_up(said)
        for needed in least:
            logits[self._vocabulary_size :] = -np.inf
            candidates, chances = sampler.distribution(logits, said)
            before = reached
            place = sampler.draw(chances) if drawn else int(chances.argmax())
            reached *= float(chances[place]) if len(chances) > 1 else _share(logits, int(candidates[0]))
            if reached < needed:
                break
            ids.append(int(candidates[place]))
            if self.leaves:
                others.append(_next_best(logits, ids[-1], before))
            distributions.append((candidates, chances))
            said.append(ids[-1])
            if len(ids) < len(least):
                logits = self._engine.append([ids[-1]])
        return Draft(tuple(ids), tuple(distributions) if drawn else None, self._likeliest(others))

    def _likeliest(self, others: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], ...]:
        """The `leaves` most likely of the next best tokens, each at its place."""
        taken = sorted(range(len(others)), key=lambda place: -others[place][1])[: self.leaves]
        return tuple((token,) if place in taken else () for place, (token, _) in enumerate(others))

    def _sampler_for(self, settings: SamplerSettings) -> Sampler:
        """Draws as the answer's own sampler would, from its own chances; Mirostat's memory is left out."""
        wanted = replace(settings, mirostat=0, seed=None, logit_bias=self._known(settings.logit_bias))
        if self._sampler is None or self._sampler.settings != wanted:
            self._sampler = Sampler(wanted, self._engine.vocabulary_size)
        return self._sampler

    def _known(self, bias: Mapping[int, float]) -> dict[int, float]:
        return {token: value for token, value in bias.items() if token < self._engine.vocabulary_size}

    def _catch_up(self, history: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits behind `history`; the cache keeps what it has in common with it."""
        shared = min(shared_prefix(self._engine.ids, history), len(history) - 1)
        self._engine.rewind(shared)
        return self._engine.append(list(history[shared:]))

    def close(self) -> None:
        self._engine.close()
        if self._on_close:
            self._on_close()
