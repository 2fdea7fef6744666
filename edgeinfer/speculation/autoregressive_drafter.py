"""The base of drafters that draft token by token, each from the logits after the previous one."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest


class AutoregressiveDrafter(Drafter):
    """With a seed, draft tokens are the most probable ones, so that the result equals baseline decoding with
    that seed. Without a seed they are sampled, which raises acceptance.

    `own_size`: vocabulary size of the drafter's logits; `vocabulary_size`: that of the target; higher ids are
    never drafted. `siblings`: number of tree siblings that a draft may have, each the next-best token at its
    position; drafts with siblings aren't sampled.
    """

    name: str = "drafter"

    def __init__(self, own_size: int, vocabulary_size: int, siblings: int = 0) -> None:
        self.siblings = siblings
        self._own_size = own_size
        self._vocabulary_size = vocabulary_size
        self._sampler: Sampler | None = None
        self._params: SamplingParams | None = None
        """The parameters that `_sampler` was made for."""
        self._buffer = np.empty(own_size, np.float32)

    @abstractmethod
    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after a text, writable; None: no draft is possible."""

    @abstractmethod
    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        """Logits after one more token."""

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """Draft token by token, until the next is too unlikely to be reached."""
        params = request.params
        is_sampled = params.temperature > 0 and params.seed is None and not self.siblings
        sampler = self._sampler_for(params)
        text, ids, probs = list(history), list[int](), list[float]()
        distributions, others, reached = list[Distribution](), list[tuple[int, float]](), 1.0
        logits = self._logits_after(text) if request.max_tokens else None
        if logits is None:
            return Draft()
        while True:
            logits[self._vocabulary_size :] = -np.inf
            token, prob, distribution = self._next_token(sampler, logits, text, is_sampled)
            before, reached = reached, reached * prob
            if reached < request.min_prob:
                break
            ids.append(token)
            probs.append(prob)
            text.append(token)
            if distribution is not None:
                distributions.append(distribution)
            if self.siblings:
                others.append(self._next_best(logits, token, before))
            if reached < request.min_prob_to_continue or len(ids) == request.max_tokens:
                break
            logits = self._logits_after_next(token)
        return Draft(
            tuple(ids),
            tuple(distributions) if is_sampled else None,
            self._most_probable(others),
            tuple(probs),
        )

    def _next_token(
        self, sampler: Sampler, logits: npt.NDArray[np.float32], text: list[int], is_sampled: bool
    ) -> tuple[int, float, Distribution | None]:
        """The next draft token, its probability, and the distribution at temperatures above 0."""
        if sampler.settings.temperature == 0:
            token = sampler.best(logits, text)
            return token, self._softmax_of(logits, token), None
        candidates, probs = sampler.distribution(logits, text)
        index = sampler.sample_index(probs) if is_sampled else int(probs.argmax())
        token = int(candidates[index])
        prob = float(probs[index]) if len(probs) > 1 else self._softmax_of(logits, token)
        return token, prob, (candidates, probs)

    def _most_probable(self, others: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], ...]:
        """The `siblings` most probable next-best tokens, each at its position."""
        best = sorted(range(len(others)), key=lambda index: -others[index][1])[: self.siblings]
        return tuple((token,) if index in best else () for index, (token, _) in enumerate(others))

    def _sampler_for(self, params: SamplingParams) -> Sampler:
        """A sampler with the completion's settings but separate uniforms; without the Mirostat state."""
        if self._sampler is None or self._params is not params:
            draft_params = replace(params, mirostat=0, seed=None, logit_bias=self._known(params.logit_bias))
            if self._sampler is None or self._sampler.settings != draft_params:
                self._sampler = Sampler(draft_params, self._own_size)
            self._params = params
        return self._sampler

    def _known(self, bias: Mapping[int, float]) -> dict[int, float]:
        return {token: value for token, value in bias.items() if token < self._own_size}

    def _softmax_of(self, logits: npt.NDArray[np.float32], token_id: int) -> float:
        """The softmax of one logit: the model's confidence if only one candidate remains."""
        np.subtract(logits, logits[token_id], out=self._buffer)
        np.exp(self._buffer, out=self._buffer)
        return float(1 / self._buffer.sum())

    def _next_best(self, logits: npt.NDArray[np.float32], best: int, reached: float) -> tuple[int, float]:
        """The second-best token, and its probability, given that the draft reaches this position."""
        self._buffer[:] = logits
        self._buffer[best] = -np.inf
        token = int(self._buffer.argmax())
        return token, reached * self._softmax_of(logits, token)
