"""The base of drafters that draft token by token, each from the logits after the previous one."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.trees.tree_growth import ROOT, Candidates, TreeGrowth, candidates


class AutoregressiveDrafter(Drafter):
    """With a seed, draft tokens are the most probable ones, so that the result equals baseline decoding with
    that seed. Without a seed they are sampled, which raises acceptance.

    `own_size`: vocabulary size of the drafter's logits; `vocabulary_size`: that of the target; higher ids are
    never drafted. `tree_width`: number of candidates after a token, if drafts are trees. A tree's tokens
    aren't sampled, and only those after the most probable path have tokens after them, unless a drafter
    evaluates several nodes together (`max_expanded`, `_expand`, or `_candidates_of`).
    """

    name: str = "drafter"
    tree_width: int = 1
    max_expanded: int = 1
    """Maximum nodes of a level of a tree that get a next level."""

    def __init__(self, own_size: int, vocabulary_size: int, tree_width: int = 1) -> None:
        self.tree_width = tree_width
        self._own_size = own_size
        self._vocabulary_size = vocabulary_size
        self._sampler: Sampler | None = None
        self._params: SamplingParams | None = None
        """The parameters that `_sampler` was made for."""
        self._buffer = np.empty(own_size, np.float32)

    @property
    def ends_drafts(self) -> bool:
        return True

    @abstractmethod
    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Logits after a text, writable; None: no draft is possible."""

    @abstractmethod
    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        """Logits after one more token."""

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """Draft token by token, until the next is too unlikely to be reached; or a tree."""
        if request.max_nodes > 0:
            return self._propose_tree(history, request)
        params = request.params
        is_sampled = params.temperature > 0 and params.seed is None
        sampler = self._sampler_for(params)
        logits = self._logits_after(history) if request.max_tokens else None
        if logits is None:
            return Draft()
        text, ids, probs = list(history), list[int](), list[float]()
        distributions, reached = list[Distribution](), 1.0
        while True:
            logits[self._vocabulary_size :] = -np.inf
            token, prob, distribution = self._next_token(sampler, logits, text, is_sampled)
            reached *= prob
            if reached < request.min_prob:
                break
            ids.append(token)
            probs.append(prob)
            text.append(token)
            if distribution is not None:
                distributions.append(distribution)
            if reached < request.min_prob_to_continue or len(ids) == request.max_tokens:
                break
            logits = self._logits_after_next(token)
        return Draft(tuple(ids), tuple(distributions) if is_sampled else None, probs=tuple(probs))

    def _propose_tree(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """Draft level by level, of each the tokens that are most likely to be reached."""
        growth = TreeGrowth(request, self.tree_width)
        first = self._candidates_after(history, request) if request.max_tokens else None
        if first is None:
            return Draft()
        found, made = [(ROOT, first)], 0
        while found:
            made += 1
            growth.begin_level()
            for node, best in found:
                growth.add(node, best)
            nodes = growth.frontier(self.max_expanded) if made < request.max_tokens else []
            found = self._candidates_of(nodes, growth, history, request) if nodes else []
        return growth.draft()._replace(made=made)

    def _candidates_after(self, history: Sequence[int], request: DraftRequest) -> Candidates | None:
        """The most probable tokens after a text; None: no draft is possible."""
        logits = self._logits_after(history)
        return None if logits is None else self._candidates(logits, history, request)

    def _candidates_of(
        self, nodes: Sequence[int], growth: TreeGrowth, history: Sequence[int], request: DraftRequest
    ) -> list[tuple[int, Candidates]]:
        """Nodes of the last level and the most probable tokens after them."""
        return [
            (node, self._candidates(logits, [*history, *growth.path(node)], request))
            for node, logits in self._expand(growth, nodes)
        ]

    def _candidates(
        self, logits: npt.NDArray[np.float32], text: Sequence[int], request: DraftRequest
    ) -> Candidates:
        logits[self._vocabulary_size :] = -np.inf
        sampler = self._sampler_for(request.params)
        return candidates(sampler, logits, text, self.tree_width, request.sharpness)

    def _expand(self, growth: TreeGrowth, nodes: Sequence[int]) -> list[tuple[int, npt.NDArray[np.float32]]]:
        """Nodes of the last level and the writable logits after them."""
        return [(node, self._logits_after_next(growth.ids[node])) for node in nodes]

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
