"""Drafting with a block drafter (DFlash, DSpark): one step of a few layers gives all tokens of a draft.

Each token of the text has its target's hidden states, whose keys and values are written to the caches of the
layers. A block begins after them, with the last token of the text, which the target hasn't processed. Its own
keys and values are overwritten by those of the tokens that were accepted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.layers.block_drafts import BlockDraftModel
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.candidate_selector import CandidateSelector
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.trees.tree_growth import TreeGrowth
from edgeinfer_kernels.backend import Backend
from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH

Floats = npt.NDArray[np.float32]


class BlockDrafter(DraftHead):
    """The drafter on the first of `backends`, for the text of `target`; the second has its Markov head.

    Without a Markov head or a selector no token of a draft depends on those before it.
    """

    name = "block drafter"

    def __init__(
        self,
        backends: Sequence[Backend[Any]],
        target: NativeEngine,
        model: BlockDraftModel,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
        batch: int = HEAD_BATCH,
        tree_width: int = 1,
    ) -> None:
        super().__init__(backends[0], target, model, nbytes, on_close, batch, tree_width)
        self.max_prompt = self._max_cycles = 0
        self._model = model
        self._markov = backends[1] if len(backends) > 1 else None
        ids = model.weights.output_ids
        self._selector = None if model.selector is None else CandidateSelector(model.selector, ids)
        self._block_layers = range(1, len(model.spec.layers))
        self._length = 0
        """The number of tokens of the next draft."""
        self._rows: Floats = np.empty((0, 0), np.float32)
        """The logits of each token of the draft, without those of the Markov head."""
        self._level = 0

    @property
    def short_vocabulary(self) -> int:
        """0: the rows of a whole block are computed at once."""
        return 0

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`; no more tokens than a block drafts."""
        self._length = min(request.max_tokens, self._model.max_drafted)
        return super().propose(history, request._replace(max_tokens=self._length))

    def _forward(self, tokens: Sequence[int], last: int) -> Any:
        """Write the keys and values of the states from `_done` to `last`; no tokens are needed."""
        self._set_states(last)
        x = self._backend.embed([self._model.mask_token] * (last - self._done))
        self._backend.forward_layers(x, self._done, [0])
        return x

    def _begin(self, history: Sequence[int]) -> int | None:
        """Process the states of a text; return the position of a block after them, that of its last token.
        None: no draft is possible.
        """
        self._idle, last = 0, self._observed.last_before(history)
        if last is None or last + 1 + self._model.rows_of(self._length) > self._target.context:
            return None
        self._process(last + 1)
        return last + 1

    def _block(self, history: Sequence[int]) -> list[int]:
        """The tokens of a block."""
        return [history[-1], *[self._model.mask_token] * (self._model.rows_of(self._length) - 1)]

    def _logits_after(self, history: Sequence[int]) -> Floats | None:
        position = self._begin(history)
        if position is None:
            return None
        x = self._backend.embed(self._block(history))
        self._backend.forward_layers(x, position, self._block_layers)
        x = x[len(x) - self._length :]
        self._rows, self._level = self._backend.logits(x), 0
        if self._selector is not None:
            self._selector.begin(self._backend.final_norm(x))
        return self._logits_of(history[-1:])[0]

    def _logits_after_next(self, token: int) -> Floats:
        self._level += 1
        return self._logits_of([token])[0]

    def _expand(self, growth: TreeGrowth, nodes: Sequence[int]) -> list[tuple[int, Floats]]:
        """As `AutoregressiveDrafter._expand`: all nodes of a level have the logits of the same row."""
        self._level += 1
        logits = self._logits_of([growth.ids[node] for node in nodes])
        return list(zip(nodes, logits, strict=True))

    def _logits_of(self, before: Sequence[int]) -> list[Floats]:
        """The logits of the next token of the draft after each of these tokens."""
        row, level = self._rows[self._level], self._level
        if self._selector is not None:
            return [self._of_target(self._selector.selected(level, row, token)) for token in before]
        if self._markov is None:
            return [self._of_target(row) for _ in before]
        return [self._of_target(row + more) for more in self._markov.logits(self._markov.embed(before))]

    def close(self) -> None:
        if self._markov is not None:
            self._markov.close()
        super().close()
