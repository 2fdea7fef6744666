"""Drafting with a smaller model of the same vocabulary."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.protocols import DraftingEngine, Engine
from edgeinfer.sampling.penalties import penalties_are_on
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafts import Draft
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest, DraftSampling


class DraftModel(AutoregressiveDrafter):
    """A small engine with a separate cache, which follows the text of the target model.

    If the engine supports a draft loop, and the sampling parameters are simple enough for it, one call makes
    a whole draft; otherwise tokens are drafted one by one.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary_size: int,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        leaves: int = 0,
        name: str = "draft model",
    ) -> None:
        self.name = name
        super().__init__(engine.vocabulary_size, vocabulary_size, leaves)
        self._engine = engine
        self._guessing = engine if isinstance(engine, DraftingEngine) else None
        self._most_given = self._guessing.most_given if self._guessing else 0
        self._choices = min(engine.vocabulary_size, vocabulary_size)
        self._asked: SamplerSettings | None = None
        self._manner: DraftSampling | None = None
        """The draft sampling parameters for the latest settings."""
        self._random = np.random.default_rng()
        self._on_close = on_close
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """As `Drafter.propose`."""
        if settings is not self._asked:
            self._asked, self._manner = settings, manner_of(settings)
        manner = self._manner
        if self._guessing is None or not self._most_given or manner is None or self.leaves:
            return super().propose(history, settings, least, further)
        if not least or len(history) + MAX_DRAFTED > self._engine.context:
            return Draft(())
        drawn = settings.temperature > 0 and settings.seed is None
        numbers = self._random.random(len(least), np.float32).tolist() if drawn else ()
        missed = self._missed(history)
        if len(missed) > self._most_given:
            self._engine.append(missed[:-1])
            missed = missed[-1:]
        wanted = DraftRequest(least, further, self._choices, manner, numbers)
        found = self._guessing.guesses(missed, wanted)
        distributions = _distributions(found) if drawn else None
        return Draft(tuple(found.ids), distributions, chances=tuple(found.chances))

    def _missed(self, history: Sequence[int]) -> list[int]:
        """The tokens of `history` that the engine hasn't cached, always including the last;
        truncates its cache.
        """
        shared = min(shared_prefix(self._engine.ids, history), len(history) - 1)
        self._engine.rewind(shared)
        return list(history[shared:])

    def _behind(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after `history`; the cache keeps the common prefix."""
        if len(history) + MAX_DRAFTED > self._engine.context:
            return None
        return self._engine.append(self._missed(history))

    def _following(self, token: int) -> npt.NDArray[np.float32]:
        return self._engine.append([token])

    def close(self) -> None:
        self._engine.close()
        if self._on_close:
            self._on_close()


def manner_of(settings: SamplerSettings) -> DraftSampling | None:
    """The draft loop's sampling parameters for these settings; None: these need the full sampler."""
    if penalties_are_on(settings) or settings.dry_multiplier > 0 or settings.logit_bias:
        return None
    if settings.temperature == 0:
        return DraftSampling()
    if settings.typical_p < 1 or settings.xtc_probability > 0 or settings.mirostat:
        return None
    return DraftSampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)


def _distributions(found: DraftedTokens) -> tuple[Distribution, ...]:
    """The distributions from which the draft tokens were sampled."""
    return tuple((ids, weights / weights.sum(dtype=np.float64)) for ids, weights in found.candidates)
