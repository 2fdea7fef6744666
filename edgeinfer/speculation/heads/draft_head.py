"""Drafting with a draft head (MTP, EAGLE-3): one layer that reads the target's hidden states.

The head processes a pair for each token of the text: the hidden state at the token, and the token after it.
The last pair gives the logits of the first draft token; later ones have the head's own hidden states. Its KV
cache begins where the observed hidden states begin, so that it needs none of a restored prompt. On a GPU the
states stay there, and the head drafts the most probable tokens, however the completion is sampled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.draft_verification import HeadRun
from edgeinfer.engine.hidden_states import ON_DEVICE, RESUMED_TOKENS, HiddenStep
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.draft_vocabulary import short_vocabulary
from edgeinfer.speculation.drafter import CycleLimits, Draft
from edgeinfer.speculation.drafter import DraftRequest as Requested
from edgeinfer.speculation.heads.head_tree import HeadTree
from edgeinfer.speculation.heads.observed_states import (
    SPARE_STATES,
    KeptStates,
    ObservedStates,
    ObservedText,
)
from edgeinfer.speculation.loop_drafter import LoopDrafter
from edgeinfer.speculation.trees.tree_growth import TreeGrowth
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH
from edgeinfer_kernels.draft_loop import (
    CyclesRequest,
    DraftCycle,
    DraftedTokens,
    DraftRequest,
    VerifyingStep,
)

IDLE_STEPS = HEAD_BATCH
"""Steps of the target without a draft after which the head is idle: drafting pauses."""
PROMPT_GROUP = 16
"""Pairs that are processed before a draft come in whole groups; the draft takes the others. For numbers that
aren't multiples of 16 a GPU has other variants of the kernels, which take milliseconds to load.
"""


class DraftHead(LoopDrafter):
    """A head on `backend`, for the text of `target`. `batch`: maximum number of its tokens in a step."""

    name = "draft head"

    def __init__(
        self,
        backend: Backend[Any],
        target: NativeEngine,
        head: DraftHeadModel,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        batch: int = HEAD_BATCH,
        tree_width: int = 1,
    ) -> None:
        size, spec, kept = target.vocabulary_size, target.specification, target.capabilities.kept_states
        can = backend.capabilities
        max_prompt = min(can.max_draft_prompt, HEAD_BATCH)
        width, only_greedy = tree_width if can.max_tree_tokens else 1, kept > 0
        super().__init__(size, size, max_prompt, width, loop_ends=can.ends_drafts, only_greedy=only_greedy)
        self.max_expanded = self.tree_width
        self._tree: HeadTree | None = None
        self._max_token = head.spec.vocabulary_size
        self._ids = head.weights.output_ids
        self._output_share = head.output_share
        self._output_rows = self._max_token
        """How many rows of the output are drafted from."""
        self._backend, self._target, self._nbytes = backend, target, nbytes
        self._on_close, self._batch = on_close, batch
        self._layers = (ON_DEVICE,) if kept else head.target_layers or (len(spec.layers),)
        write_normed = None if head.target_layers else target.backend.write_draft_states
        can_run = max_prompt and write_normed is not None and not kept and target.cache.rings is None
        cycles = min(can.max_draft_cycles, target.capabilities.max_draft_cycles)
        self._max_cycles = cycles if can_run else 0
        capacity = 2 * HEAD_BATCH + self._max_cycles * (1 + MAX_DRAFTED)
        self._observed: ObservedText = (
            KeptStates(kept - SPARE_STATES, target.backend.kept_rows)
            if kept
            else ObservedStates(capacity, len(self._layers) * spec.hidden_size, write_normed)
        )
        self._done = 0
        """Number of pairs in the head's cache."""
        self._idle = 0
        """Steps that were observed since the last draft."""
        self._state: Any = None
        """The head's hidden state at the last draft token, before its norm."""
        self._position = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._layers

    @property
    def short_vocabulary(self) -> int:
        if self._ids is not None or not self._backend.capabilities.limits_output:
            return 0
        return short_vocabulary(self._vocabulary_size, self._max_token)

    @property
    def short_cost(self) -> float:
        """As `Drafter.short_cost`: the share of the bytes that are read."""
        rows = self.short_vocabulary or self._max_token
        return 1 - (1 - rows / self._max_token) * self._output_share

    def propose(self, history: Sequence[int], request: Requested) -> Draft:
        """As `Drafter.propose`."""
        self._limit_output(request.vocabulary or self._max_token)
        return super().propose(history, request)

    def _limit_output(self, rows: int) -> None:
        """Draft from this many rows of the output."""
        if rows != self._output_rows:
            self._output_rows = rows
            self._backend.limit_output(rows)

    def observe(self, step: HiddenStep) -> None:
        """As `Drafter.observe`: process the pairs of a prompt; keep those of a few tokens for the next draft.

        The last pair before a changed token keeps the token that followed it, which has little effect. While
        no drafts are requested, the pairs aren't processed: the text then begins with the last tokens.
        """
        self._idle += 1
        self._done = min(self._done, self._observed.begin(step))
        for ids, states in step.parts(self._batch):
            if len(ids) > self._observed.free:
                self._make_room()
            self._observed.add(ids, states)
        if self._observed.end - self._done > HEAD_BATCH:
            self._make_room()

    def _make_room(self) -> None:
        """Process the observed pairs, or forget all but the last if no drafts are requested."""
        if self._idle < IDLE_STEPS:
            self._process(self._observed.end - 1)
        else:
            self._observed.restart(self._observed.end - RESUMED_TOKENS)
            self._done = 0

    def _process(self, end: int) -> None:
        """Process the pairs before `end`, whose tokens were observed, and drop the states before the last."""
        while self._done < end:
            last = min(end, self._done + self._batch)
            self._forward(self._observed.following(self._done, last), last)
            self._done = last
        self._observed.drop(max(self._observed.first, self._done - 1))

    def _forward(self, tokens: Sequence[int], last: int) -> Any:
        """Process the pairs from `_done` to `last` with these tokens; the head's hidden states."""
        self._set_states(last)
        x = self._backend.embed(tokens)
        self._backend.forward(x, self._done)
        return x

    def _set_states(self, last: int) -> None:
        """Pass the target's hidden states from `_done` to `last` to the head."""
        self._backend.set_hidden(self._observed.states(self._done, last), self._done)

    def _pending(self, history: Sequence[int]) -> list[int] | None:
        """The tokens of the pairs that the head has to process before it drafts, at most `max_prompt`; None:
        it can't draft after this text.
        """
        self._idle, last = 0, self._observed.last_before(history)
        if last is None or last + 1 + MAX_DRAFTED > self._target.context:
            return None
        self._done = min(self._done, last)  # At least the last pair, which gives the logits.
        pending, group = last + 1 - self._done, min(PROMPT_GROUP, max(1, self.max_prompt))
        if pending > max(1, self.max_prompt):
            self._process(last - (pending - 1) % group)
        return list(history[self._observed.base + self._done + 1 :])

    def _draft_after(self, history: Sequence[int], request: DraftRequest) -> DraftedTokens | None:
        tokens = self._pending(history)
        if tokens is None:
            return None
        end = self._done + len(tokens)
        self._set_states(end)
        if step := self._verifying_step(history, len(request.min_probs)):
            request = request._replace(step=step)
        drafted = self._backend.draft(tokens, self._done, request)
        self._done = end
        return drafted

    def max_cycles(self, engine: Engine) -> int:
        """As `Drafter.max_cycles`: of the target's text, if both run on the same threads."""
        return self._max_cycles if engine is self._target else 0

    def run_cycles(self, history: Sequence[int], request: Requested, limits: CycleLimits) -> list[DraftCycle]:
        """As `Drafter.run_cycles`."""
        observed, sampling = self._observed, self._sampling_of(request.params)
        assert isinstance(observed, ObservedStates)
        if sampling is None or (tokens := self._pending(history)) is None:
            return []
        self._limit_output(request.vocabulary or self._max_token)
        end, count = self._done + len(tokens), limits.cycles * (1 + request.max_tokens)
        observed.cut(end)
        if observed.free < count:
            observed.drop(max(observed.first, self._done - 1))
        self._set_states(end)
        start, self._done = self._done, end
        head = HeadRun(self._backend, tokens, start, self._loop_request(request, sampling, ()))
        position = len(self._target.ids)
        run = CyclesRequest(history[-1], position, *limits, observed.space(count))
        cycles = self._target.run_cycles(head, run)
        if cycles:
            read = self._target.ids[position:]
            observed.add_written(read)
            self._done += len(read) - len(cycles[-1].found)
            self._idle = 1
        return cycles

    def _verifying_step(self, history: Sequence[int], count: int) -> VerifyingStep | None:
        """As `step` of the request of a draft of `count` tokens after a text."""
        return None

    def _logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32] | None:
        tokens = self._pending(history)
        if tokens is None:
            return None
        self._position = self._done + len(tokens)
        self._state = self._forward(tokens, self._position)[-1:]
        self._done, self._tree = self._position, None
        return self._logits()

    def _logits_after_next(self, token: int) -> npt.NDArray[np.float32]:
        self._backend.set_own_hidden(self._state, self._position)
        self._state = self._backend.embed([token])
        self._backend.forward(self._state, self._position)
        self._position += 1
        return self._logits()

    def _expand(self, growth: TreeGrowth, nodes: Sequence[int]) -> list[tuple[int, npt.NDArray[np.float32]]]:
        """As `AutoregressiveDrafter._expand`, all nodes in one step."""
        if self._tree is None:
            row, positions = self._state.copy(), self._target.context
            self._tree = HeadTree(self._backend, row, self._position, MAX_DRAFTED, positions)
        level = len(growth.path(nodes[0]))
        found = self._tree.evaluate([(n, growth.parents[n], growth.ids[n]) for n in nodes], level)
        return [(node, self._of_target(logits)) for node, logits in found]

    def _logits(self) -> npt.NDArray[np.float32]:
        """(vocabulary of the target,): the logits at the last hidden state."""
        return self._of_target(self._backend.logits(self._state)[0])

    def _of_target(self, own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The head's logits as those of the target's vocabulary; it doesn't draft the others."""
        logits = np.full(self._vocabulary_size, -np.inf, np.float32)
        logits[slice(len(own)) if self._ids is None else self._ids] = own
        return logits

    def close(self) -> None:
        self._backend.close()
        if self._on_close:
            self._on_close()
