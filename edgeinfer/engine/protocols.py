"""Protocols of the engine layer: an engine (ids to logits) and a tokenizer (text to ids)."""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.hidden_states import HiddenObserver
from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.errors import SettingError
from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.spilled_pages import SpillBudget
from edgeinfer_kernels.backend import ExpertCounts
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest

Progress = Callable[[int, int], None]
"""Called during prefill with (tokens done, tokens in total)."""


PromptSteps = Generator[int, None, npt.NDArray[np.float32]]
"""Yields the number of tokens done after each step; returns the logits (vocabulary,) after the last token."""


def all_steps(steps: PromptSteps, total: int, progress: Progress | None) -> npt.NDArray[np.float32]:
    """Run all steps of a prompt of `total` tokens; return the logits after its last token."""
    while True:
        done, logits = next_step(steps, total)
        if progress:
            progress(done, total)
        if logits is not None:
            return logits


def next_step(steps: PromptSteps, total: int) -> tuple[int, npt.NDArray[np.float32] | None]:
    """Run a step; return the number of tokens done, and after the last step the logits."""
    try:
        done = next(steps)
        if done < total:
            return done, None
        next(steps)
    except StopIteration as end:
        logits: npt.NDArray[np.float32] = end.value
        return total, logits
    raise AssertionError("a step after the last token")


class TokenSampler(Protocol):
    """Samples tokens on the device, so that only ids are copied."""

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """Process the last token of `history`; return the next id. None: not processed, the host has to
        sample.

        `ahead`: the next token will be requested too, and may be started early.
        """
        ...


class Engine(Protocol):
    """Computes logits from token ids and keeps the KV cache; it doesn't handle text."""

    @property
    def context(self) -> int:
        """Maximum number of tokens in the cache."""
        ...

    @property
    def largest_context(self) -> int:
        """Maximum number of tokens that a cache of this model could hold on this machine."""
        ...

    @property
    def others(self) -> "Sequence[Engine]":
        """Engines of the same weights, each with a separate state, for further sequences."""
        ...

    @property
    def spill(self) -> SpillBudget:
        """Bytes for idle prefixes besides its cache, and those of `others`."""
        ...

    @property
    def parallel(self) -> int:
        """Number of texts of the whole context whose states it holds at once, with those of `others`."""
        ...

    @property
    def ids(self) -> list[int]:
        """The cached tokens."""
        ...

    def cached_prefix(self, text: Sequence[int]) -> int:
        """The number of first tokens of a text that are cached. A text may grow after a call; its tokens
        don't change.
        """
        ...

    @property
    def vocabulary_size(self) -> int: ...

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Process `ids` after the cached tokens; return the logits (vocabulary,) after the last of them.

        `progress` is called after each processed part. If it raises, the cache holds the parts processed so
        far.

        Raises:
            EdgeInferError: the engine has been closed.
        """
        ...

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        """As `append`, in steps of at most `limit` tokens. Other sequences may use the device between two of
        them; the engine's text must not change.
        """
        ...

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process `ids`; return the logits (len(ids), vocabulary) after each of them."""
        ...

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """Process `ids` in one step; return the ids of the largest logits after each of them, found where the
        logits are. None, and nothing is processed: the engine can't, or a logit isn't finite.
        """
        ...

    def append_sampled(self, ids: Sequence[int], sampler: Sampler) -> list[int] | None:
        """As `append_best`, with the tokens that `sampler` would sample after each of `ids`; -1: the host has
        to. None, and nothing is processed: the engine can't.
        """
        ...

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Process `ids`; return the final hidden states of each, (len(ids), hidden size) float32.

        Raises:
            EdgeInferError: this engine doesn't support it.
        """
        ...

    def hand_out(self, layers: Sequence[int], observer: HiddenObserver) -> None:
        """Call `observer` after each step of one sequence with its hidden states after these numbers of
        layers, as `HiddenTap`; without layers no longer. Steps that several sequences share are not passed
        on.
        """
        ...

    def pause_hidden(self, tokens: int) -> None:
        """No hidden states are read for this many tokens from now on: they may be left out."""
        ...

    def snapshot(self) -> Snapshot | None:
        """The cache content, to be restored later; None: not supported by this engine."""
        ...

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """Restore the first `length` tokens of a snapshot. Raises `ValueError` if it doesn't fit."""
        ...

    def rewind(self, length: int) -> None:
        """Truncate the cache to the first `length` tokens."""
        ...

    def reusable(self, length: int, snapshot: Snapshot | None = None) -> int:
        """How many of the first `length` tokens of the cache, or of a snapshot, needn't be processed again:
        all; of recurrent states those before a stored one; or none if ring caches no longer hold what the
        next token needs.
        """
        ...

    def device_sampler(self, sampler: Sampler) -> TokenSampler | None:
        """The device sampler for this stream; None: the host samples."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read per decoded token."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do besides; the methods below need the capability of their name."""
        ...

    @property
    def expert_counts(self) -> ExpertCounts:
        """Token-expert assignments in layers with split experts; 0 without."""
        ...

    def draft(self, ids: Sequence[int], request: DraftRequest) -> DraftedTokens:
        """Process `ids`, then draft and continue, as the backend's draft loop; updates the cache."""
        ...

    @property
    def text(self) -> list[int]:
        """The processed tokens, including all evicted ones."""
        ...

    @property
    def first_evicted(self) -> int | None:
        """The number of first tokens that were processed before any eviction; None: no eviction."""
        ...

    def cached_of(self, length: int) -> int:
        """Number of cached tokens among the first `length` tokens of `text`."""
        ...

    def evict(self, indices: Sequence[int]) -> None:
        """Evict the tokens at `indices` (rising indices in `ids`); later ones move up."""
        ...

    def attention_scores(self, count: int) -> npt.NDArray[np.float64]:
        """(cached tokens,): attention scores of each from the last `count` tokens, which are
        processed again.
        """
        ...


class BasicEngine:
    """Base of engines without capabilities."""

    ids: list[int]
    others: Sequence[Engine] = ()
    parallel = 1
    spill = SpillBudget()
    capabilities = Capabilities()

    def cached_prefix(self, text: Sequence[int]) -> int:
        return shared_prefix(self.ids, text)

    @property
    def expert_counts(self) -> ExpertCounts:
        return ExpertCounts()

    def prompt_steps(self, ids: Sequence[int], limit: int | None = None) -> PromptSteps:
        raise NotImplementedError("this engine has no steps")

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        return all_steps(self.prompt_steps(ids), len(ids), progress)

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        return None

    def append_sampled(self, ids: Sequence[int], sampler: Sampler) -> list[int] | None:
        return None

    @property
    def text(self) -> list[int]:
        return self.ids

    @property
    def first_evicted(self) -> int | None:
        return None

    def cached_of(self, length: int) -> int:
        return length

    def reusable(self, length: int, snapshot: Snapshot | None = None) -> int:
        return length

    def hand_out(self, layers: Sequence[int], observer: HiddenObserver) -> None:
        raise SettingError("draft: this engine hands out no hidden states; take 'lookup' or a draft model")

    def pause_hidden(self, tokens: int) -> None:
        return

    def draft(self, ids: Sequence[int], request: DraftRequest) -> DraftedTokens:
        raise NotImplementedError("this engine has no draft loop")

    def evict(self, indices: Sequence[int]) -> None:
        raise NotImplementedError("this engine can't evict tokens")

    def attention_scores(self, count: int) -> npt.NDArray[np.float64]:
        raise NotImplementedError("this engine has no attention scores")


class TextDecoder(Protocol):
    """Incremental detokenizer; never returns part of a character."""

    @property
    def pending(self) -> bool:
        """Whether an incomplete character is buffered."""
        ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextTokenizer(Protocol):
    """Converts text to ids and back."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def control_texts(self) -> Sequence[str]:
        """The texts of control tokens, and of those that mark roles and reasoning."""
        ...

    def encode(
        self,
        text: str,
        *,
        bos: bool = False,
        special: bool = False,
        restore: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Encode text. `restore` is applied to the text between special tokens, after these have
        been found.
        """
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_control(self, token_id: int) -> bool:
        """Whether a token adds no text to a completion, such as an end token."""
        ...

    def stream_decoder(self) -> TextDecoder: ...
