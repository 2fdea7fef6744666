"""The base of drafters whose backend makes a whole draft in one call, if the sampling parameters allow it."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling.chain import active_steps
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.autoregressive_drafter import AutoregressiveDrafter
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer_kernels import draft_loop
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftSampling


class LoopDrafter(AutoregressiveDrafter):
    """Drafts with the draft loop of a backend; token by token with other sampling parameters, or trees.

    `max_prompt`: maximum tokens that the loop processes before it drafts; 0: there is no loop. `loop_ends`:
    it makes no token after one from which no other pays. `only_greedy`: it drafts the most probable tokens,
    for completions with any sampling parameters.
    """

    def __init__(
        self,
        own_size: int,
        vocabulary_size: int,
        max_prompt: int,
        tree_width: int = 1,
        *,
        loop_ends: bool,
        only_greedy: bool = False,
    ) -> None:
        super().__init__(own_size, vocabulary_size, tree_width)
        self.max_prompt = max_prompt
        self._loop_ends = loop_ends
        self._only_greedy = only_greedy
        self._max_token = min(own_size, vocabulary_size)
        self._params_of_loop: SamplingParams | None = None
        self._loop_sampling: DraftSampling | None = None
        """The draft loop's sampling parameters for the latest parameters."""
        self._random = np.random.default_rng()

    @property
    def ends_drafts(self) -> bool:
        return not self.max_prompt or self._loop_ends

    @abstractmethod
    def _draft_after(self, history: Sequence[int], request: draft_loop.DraftRequest) -> DraftedTokens | None:
        """The result of the draft loop after a text; None: no draft is possible."""

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`."""
        params, sampling = request.params, self._sampling_of(request.params)
        if not self.max_prompt or sampling is None or request.max_nodes:
            return super().propose(history, request)
        if not request.max_tokens:
            return Draft()
        is_sampled = params.temperature > 0 and params.seed is None and not self._only_greedy
        uniforms = self._random.random(request.max_tokens, np.float32).tolist() if is_sampled else ()
        drafted = self._draft_after(history, self._loop_request(request, sampling, uniforms))
        if drafted is None:
            return Draft()
        distributions = _distributions(drafted) if is_sampled else None
        return Draft(tuple(drafted.ids), distributions, probs=tuple(drafted.probs), made=drafted.made)

    def _sampling_of(self, params: SamplingParams) -> DraftSampling | None:
        """The draft loop's sampling parameters; None: it can't draft for these."""
        if params is not self._params_of_loop:
            self._params_of_loop = params
            self._loop_sampling = DraftSampling() if self._only_greedy else draft_sampling(params)
        return self._loop_sampling

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
