"""The protocol of a backend, which runs the layers of a decoder on hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.layer_cache import LANES
from edgeinfer_kernels.caches.state_rows import StateRows
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.decoder_state import DecoderState, PageParts, StatePool
from edgeinfer_kernels.draft_loop import CyclesRequest, DraftCycle, DraftedTokens, DraftRequest
from edgeinfer_kernels.lora.weights import ModelLora

Activations = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]
StateArrays = list[npt.NDArray[np.generic]]
OnHidden = Callable[[int, Activations, npt.NDArray[np.int64] | None], None]
"""Called with a layer and the hidden rows of its feed-forward, of all or some tokens, valid until it returns:
(tokens, neurons) and None if it is dense; (tokens, experts per token, neurons) and the experts.
"""


class BackendError(RuntimeError):
    """The device failed during execution; the message describes the failure. The backend is unusable
    afterwards.
    """


PAGE = LANES
"""Positions of a page: sequences that share a cache are stored in such pages."""


@dataclass(frozen=True)
class BatchPositions:
    """Positions of tokens of several sequences, and their slots in the cache.

    positions: (tokens,) int64. pages: (tokens, pages of the longest sequence) int64, the cache page that
    holds each PAGE positions of a token's sequence. copies: for each token, or for none, further cache slots
    that receive its key and value.
    """

    positions: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    copies: tuple[tuple[int, ...], ...] = ()

    def slots(self, token: int, end: int) -> npt.NDArray[np.int64]:
        """Cache slots that hold the first `end` positions of a token's sequence."""
        position = np.arange(end)
        return np.asarray(self.pages[token, position // PAGE] * PAGE + position % PAGE)


class ExpertCounts(NamedTuple):
    """Token-expert assignments so far in layers whose experts are split: all of them, and those that the CPU
    computed.
    """

    total: int = 0
    on_cpu: int = 0


class SamplingSettings(Protocol):
    """The sampling parameters that a device can apply."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repeat_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...


class HiddenStates(Protocol):
    """Hidden states of some tokens, on any device; a slice has the same type."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


X = TypeVar("X", bound=HiddenStates)


class Backend(Protocol[X]):
    """The loaded layers of a decoder with their state: KV caches and the like.

    Implementations derive from this class. The methods of a capability that a backend doesn't have raise
    `NotImplementedError`. The result of `embed` belongs to the backend and is valid until the next `embed`.
    """

    name: str
    capabilities: Capabilities

    @property
    def state_nbytes(self) -> int:
        """Bytes of the state of all layers."""
        ...

    def embed(self, ids: Sequence[int]) -> X:
        """Scaled embeddings of at most `batch` tokens."""
        ...

    def forward(self, x: X, start: int) -> None:
        """Run all layers in order, for tokens at positions start…, and update their state."""
        ...

    def logits(self, x: X) -> Logits:
        """(tokens, vocabulary) float32: logits of the hidden states x, as a new array."""
        ...

    def final_norm(self, x: X) -> Activations:
        """(tokens, hidden_size) float32: the hidden states x after the final norm, the input of the head."""
        ...

    def write_draft_states(self, x: X, out: StateRows) -> None:
        """Write what `final_norm` returns, for a draft head, whose drafts may differ by rounding."""
        out.view[:] = self.final_norm(x)

    def snapshot(self, end: int) -> StateArrays:
        """The state after the first `end` positions, in a backend-specific order and layout. Arrays in main
        memory are views.
        """
        ...

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """Restore the first `end` positions from the arrays of `snapshot`, which may hold more.

        Raises:
            ValueError: the arrays have other shapes or dtypes.
        """
        ...

    def checkpoint(self) -> None:
        """Keep the recurrent states after the last step, so that a later rewind can return to them."""

    def rewind(self, length: int) -> int:
        """Truncate the state to at most `length` positions; return how many are kept.

        Fewer than `length` are kept if some block's state is recurrent (`recurrent_state.py`).
        """
        return length

    def reach(self, length: int) -> int:
        """How many positions `rewind` would keep."""
        return length

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """Evict `positions` (ascending). The remaining ones up to `end` are compacted and their keys get the
        RoPE of their new positions.

        Raises:
            ValueError: some of the positions do not exist, or they are not ascending.
        """
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...

    @property
    def expert_counts(self) -> ExpertCounts:
        """Counts of token-expert assignments; 0 if no layer's experts are split."""
        return ExpertCounts()

    def step_logits(self, ids: Sequence[int], start: int) -> Logits:
        """(len(ids), vocabulary) float32, a new array: the logits of tokens at positions start…, computed in
        one call. They are bit-identical to those of `embed`, `forward` and `logits`.
        """
        _refuse(self)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Keep the hidden states after these numbers of layers (0: the embeddings) in each `forward` or
        `step_logits` from now on. Nothing is copied for those after the last layer.
        """
        _refuse(self)

    def kept_hidden(self, tokens: int) -> list[X]:
        """The kept states of the last step, which had this many tokens: one for each of the `layers`, on the
        device, valid until the next step.
        """
        _refuse(self)

    def kept_rows(self, first: int, count: int) -> X:
        """States among the `kept_states` of the capabilities, from a position of the text on, as the
        `set_hidden` of a draft head on the same device takes them.
        """
        _refuse(self)

    def set_hidden(self, states: X, start: int) -> None:
        """The target's hidden states for the tokens of the next step, at `start`, of a draft head: after the
        final norm for one of MTP, those after several layers in a row for one of EAGLE-3. They must not
        change before that step. In main memory they may be StateRows.
        """
        _refuse(self)

    def set_own_hidden(self, x: X, start: int) -> None:
        """As `set_hidden`, for tokens after drafted ones: the head's rows after its layer, without a norm."""
        _refuse(self)

    def medusa_logits(self, states: X, head: int) -> Logits:
        """(tokens, vocabulary) float32, a new array: the logits of a Medusa head for hidden states of its
        target after the final norm; at most as many as a step has tokens.
        """
        _refuse(self)

    def forward_batch(self, x: X, positions: BatchPositions) -> None:
        """As `forward`, for tokens of several sequences. A token attends to its sequence up to its own
        position, including positions of earlier steps.

        Consecutive tokens of one sequence, a chunk of its prompt, may be as many as `embed` takes; the result
        is bit-identical to that of `forward`.
        """
        _refuse(self)

    def forward_tree(self, x: X, start: int, parents: Sequence[int]) -> None:
        """As `forward`, for the token at position `start` and a tree of tokens after it: each attends to the
        text and to the tokens before it. `parents`: for each token of the tree the index of the one before
        it, -1 for the token at `start`. The state is that of the text, until `keep_path`.
        """
        _refuse(self)

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        """The end of the positions that `forward_tree` writes, from `start` on."""
        _refuse(self)

    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        """Continue the state with the tokens of a path through the last tree: its `rows` of the step, the
        first of which is 0.
        """
        _refuse(self)

    def forward_texts(self, x: X, lengths: Sequence[int]) -> None:
        """As `forward`, of an encoder: the tokens of texts of these lengths, one text after another."""
        _refuse(self)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        """Copy the state of `count` positions; the ranges must not overlap. For batches."""
        _refuse(self)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy cache pages. All sources are read before a target is written. For batches."""
        _refuse(self)

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        """Copies of cache pages in main memory, each in separate memory. For batches."""
        _refuse(self)

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        """Write what `read_pages` returned for each page to cache pages. For batches."""
        _refuse(self)

    def with_state(self, state: DecoderState) -> "Backend[X]":
        """A backend with the same weights and buffers and another state, for another sequence. It is used
        alternately with this one, which closes both.
        """
        _refuse(self)

    def joined(self, pool: StatePool) -> "Backend[X]":
        """A backend with the same weights and buffers for `forward_states`, on the states of a pool, which
        other backends have too. It is used alternately with those.
        """
        _refuse(self)

    def forward_states(self, x: X, starts: Sequence[int], states: Sequence[int]) -> None:
        """As `forward`, for one token of each of some states of the pool, whose numbers are `states`, at
        these positions. The result is bit-identical to that of each alone.

        The backend of each state `is_at` its position.
        """
        _refuse(self)

    def is_at(self, position: int) -> bool:
        """Whether `forward_states` may take a token at this position, the next one."""
        return True

    def forward_layers(self, x: X, start: int, layers: Sequence[int]) -> None:
        """As `forward`, for these layers only."""
        _refuse(self)

    def attention_scores(self, x: X, start: int) -> npt.NDArray[np.float64]:
        """(start + len(x),) float64: the attention weight that each position receives from tokens at
        positions start…, whose embeddings are x; summed over tokens, heads and layers.
        """
        _refuse(self)

    def set_lora(self, lora: ModelLora) -> None:
        """Use these LoRA adapters, and no others, from the next forward on. The state is that of the others.

        Raises:
            LoraError: an adapter of a matrix that the backend multiplies without.
        """
        _refuse(self)

    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """Evaluate `ids` at positions start…, then draft and evaluate further tokens. It stops if no logit is
        finite.

        A backend may sample from fewer candidates than the sampling parameters allow; the result lists them.
        """
        _refuse(self)

    def draft_cycles(
        self, target: "Backend[X]", ids: Sequence[int], start: int, request: DraftRequest, run: CyclesRequest
    ) -> list[DraftCycle]:
        """As `draft` of a draft head, then the step of its target that verifies the draft, then the next
        draft after what that step has found, and so on, in one call. A step with a logit that isn't finite
        ends the run, and is left out; other cycles are at most `run.max_cycles`.

        Both backends have the capability `max_draft_cycles` and the same thread pool. Their caches then hold
        what the same drafts and steps leave one by one.
        """
        _refuse(self)

    def limit_output(self, rows: int) -> None:
        """Compute only the first rows of the output of a draft head from now on, a multiple of DRAFT_ROWS or
        all: `draft` drafts no others, and `logits` may have no others.
        """
        _refuse(self)

    def draft_level(
        self, ids: Sequence[int], start: int, parents: Sequence[int], count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """Evaluate `ids` at positions start…, of a draft head on a device; the `count` most probable tokens
        after the last of them, falling, with the softmax of `power` times the logits.

        With `parents` they are the tokens of a draft tree so far, each with the head's own state of the one
        before it: its index, -1 for the last token of the text before. Then the candidates after each of
        them.
        """
        _refuse(self)

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        """The parameters of one sample for `sample_next`; `recent`: number of ids for the penalties."""
        _refuse(self)

    def best_ids(self, ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> list[int]:
        """Process a few tokens at positions start… in one step; the ids of the largest logits after each,
        found on the device, the lowest among equals; -1 if a logit isn't finite. `parents`: of a tree, as
        `forward_tree`.
        """
        _refuse(self)

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        """Evaluate one token at `start` and sample the next on the device; -1: the host must sample.

        `request` None: the id of the largest logit; else a `sampling_request`, with the `recent` ids for its
        penalties. If the cache has space (`may_run_ahead`) and the next request is known, the device may
        evaluate the sampled token while the caller processes its id.
        """
        _refuse(self)

    def sample_batch(
        self,
        x: X,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """The next tokens after the tokens of `forward_batch`, sampled on the device; -1: the host must
        sample from the logits. For each token a `sampling_request`, and the recent ids for its penalties.

        `following`: the device may evaluate the sampled tokens at these positions while the caller processes
        them; a `forward_batch` that asks for just that continues this step.
        """
        _refuse(self)


def _refuse(backend: Backend[Any]) -> NoReturn:
    raise NotImplementedError(f"the {backend.name} backend doesn't have this capability")
