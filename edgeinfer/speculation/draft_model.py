"""Drafting with a smaller model of the same vocabulary."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import shared_prefix
from edgeinfer.engine.protocols import Engine
from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling.chain import active_steps
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer_kernels import draft_loop
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftSampling


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
        siblings: int = 0,
        name: str = "draft model",
    ) -> None:
        self.name = name
        super().__init__(engine.vocabulary_size, vocabulary_size, siblings)
        self.engine = engine
        self.max_prompt = engine.capabilities.max_draft_prompt
        """Maximum tokens that the engine's draft loop processes before it drafts; 0: it has none."""
        self._max_token = min(engine.vocabulary_size, vocabulary_size)
        self._params_of_loop: SamplingParams | None = None
        self._loop_sampling: DraftSampling | None = None
        """The draft loop's sampling parameters for the latest parameters."""
        self._random = np.random.default_rng()
        self._on_close = on_close
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`."""
        params = request.params
        if params is not self._params_of_loop:
            self._params_of_loop, self._loop_sampling = params, draft_sampling(params)
        sampling = self._loop_sampling
        if not self.max_prompt or sampling is None or self.siblings:
            return super().propose(history, request)
        if not request.max_tokens or len(history) + MAX_DRAFTED > self.engine.context:
            return Draft()
        is_sampled = params.temperature > 0 and params.seed is None
        uniforms = self._random.random(request.max_tokens, np.float32).tolist() if is_sampled else ()
        missed = self._uncached_ids(history)
        if len(missed) > self.max_prompt:
            self.engine.append(missed[:-1])
            missed = missed[-1:]
        drafted = self.engine.draft(missed, self._loop_request(request, sampling, uniforms))
        distributions = _distributions(drafted) if is_sampled else None
        return Draft(tuple(drafted.ids), distributions, probs=tuple(drafted.probs))

    def _loop_request(
        self, request: DraftRequest, sampling: DraftSampling, uniforms: Sequence[float]
    ) -> draft_loop.DraftRequest:
        count = request.max_tokens
        return draft_loop.DraftRequest(
            [request.min_prob] * count,
            [request.min_prob_to_continue] * count,
            self._max_token,
            sampling,
            uniforms,
        )

    def _uncached_ids(self, history: Sequence[int]) -> list[int]:
        """The tokens of `history` that the engine hasn't cached, always including the last;
        truncates its cache.
        """
        shared = min(shared_prefix(self.engine.ids, history), len(history) - 1)
        self.engine.rewind(shared)
        return list(history[shared:])

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after `history`; the cache keeps the common prefix."""
        if len(history) + MAX_DRAFTED > self.engine.context:
            return None
        return self.engine.append(self._uncached_ids(history))

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        return self.engine.append([token])

    def close(self) -> None:
        self.engine.close()
        if self._on_close:
            self._on_close()


def draft_sampling(params: SamplingParams) -> DraftSampling | None:
    """The draft loop's sampling parameters; None: an active step of the sampler chain isn't in the loop."""
    if not all(step.in_draft_loop for step in active_steps(params)):
        return None
    if params.temperature == 0:
        return DraftSampling()
    return DraftSampling(params.temperature, params.top_k, params.top_p, params.min_p)


def _distributions(drafted: DraftedTokens) -> tuple[Distribution, ...]:
    """The distributions from which the draft tokens were sampled."""
    return tuple((ids, weights / weights.sum(dtype=np.float64)) for ids, weights in drafted.candidates)
