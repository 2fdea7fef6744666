"""Steps that verify drafts: what follows each token of a chain or of a tree, found where the logits are."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.device_sampling import (
    expected_requests,
    penalized,
    sample_after_each,
    samples_on,
)
from edgeinfer.engine.guards import DEVICE_FAILURES, UsePermission
from edgeinfer.engine.hidden_states import HiddenTap
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.sampling import Sampler
from edgeinfer_kernels.backend import PAGE, Backend, HiddenStates
from edgeinfer_kernels.caches.ring_cache import RING_SPARE
from edgeinfer_kernels.caches.tree_pages import tree_positions
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle, DraftRequest, VerifyingStep


class HeadRun(NamedTuple):
    """The first draft of a run: what a draft head reads before it, from a position of its text on, and the
    request, which is that of all further drafts.
    """

    backend: Backend[Any]
    ids: Sequence[int]
    start: int
    request: DraftRequest


class DraftVerification:
    """The part of `NativeEngine` that verifies drafts. A chain is processed as the next tokens; of a tree the
    cache keeps the path that the caller chooses.
    """

    backend: Backend[Any]
    cache: KVCache
    capabilities: Capabilities
    batch: int
    _step_tokens: int
    """Maximum tokens of one step that verifies a draft."""
    _use: UsePermission
    _hidden: HiddenTap | None
    _sampler: Sampler | None
    """Of the last chain, if it was verified by sampling: the next one is expected to be, too."""

    def _check(self, ids: Sequence[int], more: int = 0) -> None:
        """Raise if the cache has no space for `ids` and `more` tokens, which is reserved."""
        raise NotImplementedError

    def _check_ids(self, ids: Sequence[int]) -> None:
        """Raise if `ids` are invalid."""
        raise NotImplementedError

    def _forward(self, ids: Sequence[int]) -> HiddenStates:
        """One step of the next tokens."""
        raise NotImplementedError

    def _processed(self, ids: Sequence[int]) -> None:
        """The cache holds the tokens of a step now."""
        raise NotImplementedError

    def rewind(self, length: int) -> None:
        """As `Engine.rewind`."""
        raise NotImplementedError

    def logits(self, x: HiddenStates) -> npt.NDArray[np.float32]:
        """The logits of some hidden states."""
        raise NotImplementedError

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """As `Engine.append_best`."""
        if not self.capabilities.finds_best or len(ids) > self._step_tokens:
            return None
        start, self._sampler = self._make_room(ids), None
        with DEVICE_FAILURES:
            best = self.backend.best_ids(ids, start)
        self._processed(ids)
        if min(best) < 0:  # The host processes them again, and reports the logits.
            self.rewind(start)
            return None
        return best

    def prepare_verification(self, text: Sequence[int], count: int) -> VerifyingStep | None:
        """Make room for the last token of a text, whose others are cached, and for a draft of `count` tokens
        after it; the step that verifies these. None: a draft head can't start it.
        """
        fits = 1 + count <= min(self._step_tokens, self.cache.free)
        is_next = len(text) == len(self.cache.ids) + 1
        if not self.capabilities.starts_verification or not fits or not is_next:
            return None
        requests = expected_requests(self.backend, self._sampler, 1 + count) if self._sampler else ()
        return VerifyingStep(text[-1], self._make_room(text[-1:], count), requests)

    def run_cycles(self, head: HeadRun, run: CyclesRequest) -> list[DraftCycle]:
        """Let a head draft after the next token of the text, and verify the drafts, as
        `Backend.draft_cycles`; the cache then holds the tokens that were found, except the last.
        """
        steps, self._sampler = run.max_cycles * (1 + len(head.request.min_probs)), None
        self._make_room([run.token], min(run.limit, steps))
        with DEVICE_FAILURES:
            cycles = head.backend.draft_cycles(self.backend, head.ids, head.start, head.request, run)
        if cycles:
            found = [token for each in cycles for token in each.found]
            self.cache.append([run.token, *found[:-1]])
        return cycles

    def _make_room(self, ids: Sequence[int], more: int = 0) -> int:
        """Make room for the next tokens and `more`, which `_check` accepts; the position of the first."""
        self._check(ids, more)
        start = len(self.cache.ids)
        if self.cache.rings is not None:  # as in `_forward`
            self.cache.rings.extend(start + len(ids) + more)
        return start

    def append_sampled(self, ids: Sequence[int], sampler: Sampler) -> list[int] | None:
        """As `Engine.append_sampled`."""
        if not samples_on(self.backend, sampler) or len(ids) > self._step_tokens:
            return None
        self._check(ids)
        self._sampler = sampler
        before = list(penalized(sampler, self.cache.ids))  # the step adds to them
        x, paths = self._forward(ids), [ids[:end] for end in range(1, len(ids) + 1)]
        return sample_after_each(self.backend, x, before, paths, sampler)

    def holds_tree(self, parents: Sequence[int]) -> bool:
        """Whether a step can have a token and a tree after it, as `Backend.forward_tree`, and the cache their
        keys and values.
        """
        start = len(self.cache.ids)
        if 1 + len(parents) > self.capabilities.max_tree_tokens:
            return False
        end = self.backend.tree_end(start, parents)
        fits = -(-end // PAGE) <= -(-self.cache.context // PAGE)
        if self.cache.rings is not None:
            fits = fits and end - start <= RING_SPARE
        return fits and max(tree_positions(start, parents)) < self.cache.context

    def append_tree(self, ids: Sequence[int], parents: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process the next token and a tree after it, as `Backend.forward_tree`; logits (len(ids),
        vocabulary). The cache's ids don't change until `keep_path`.
        """
        return self.logits(self._forward_tree(ids, parents))

    def best_of_tree(self, ids: Sequence[int], parents: Sequence[int]) -> list[int] | None:
        """As `append_tree`; the ids of the largest logits. None: as `append_best`."""
        if not self.capabilities.finds_best:
            return None
        start = self._begin_tree(ids, parents)
        with DEVICE_FAILURES:
            best = self.backend.best_ids(ids, start, parents)
        return None if min(best) < 0 else best

    def sampled_of_tree(
        self, ids: Sequence[int], parents: Sequence[int], sampler: Sampler
    ) -> list[int] | None:
        """As `append_tree`, with the tokens that `append_sampled` returns."""
        if not samples_on(self.backend, sampler):
            return None
        x, paths = self._forward_tree(ids, parents), [[ids[0]]]
        for token, parent in zip(ids[1:], parents, strict=True):
            paths.append([*paths[1 + parent], token])
        return sample_after_each(self.backend, x, penalized(sampler, self.cache.ids), paths, sampler)

    def _forward_tree(self, ids: Sequence[int], parents: Sequence[int]) -> HiddenStates:
        """As `append_tree`; the hidden states after the last layer."""
        start = self._begin_tree(ids, parents)
        with DEVICE_FAILURES:
            x: HiddenStates = self.backend.embed(ids)
            self.backend.forward_tree(x, start, parents)
        return x

    def _begin_tree(self, ids: Sequence[int], parents: Sequence[int]) -> int:
        self._use.check()
        self._check_ids(ids)
        start = len(self.cache.ids)
        self.cache.reserve(self.backend.tree_end(start, parents))
        return start

    def keep_path(self, ids: Sequence[int], parents: Sequence[int], rows: Sequence[int]) -> None:
        """Continue the text with a path through the tree of the last step: `ids`, which had these rows."""
        with DEVICE_FAILURES:
            self.backend.keep_path(len(self.cache.ids), parents, rows)
        self.cache.append(ids)
        if self._hidden is not None:
            self._hidden.step(ids, self.cache.ids, rows)
