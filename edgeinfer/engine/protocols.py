"""The protocols of the top floor: an engine that turns ids into logits, a tokenizer that makes the ids."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling import Sampler
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest

Progress = Callable[[int, int], None]
"""Called during prefill with (tokens done, tokens in all)."""


class TokenSampler(Protocol):
    """Chooses tokens where the logits lie, so that only ids travel."""

    def next(self, history: Sequence[int], ahead: bool = True) -> int | None:
        """Read the last token of `history`; the id that follows. None: not read, the host has to sample.

        `ahead`: it will be asked for the next token too, and may begin with that.
        """
        ...


class Engine(Protocol):
    """Turns token ids into logits and remembers what it has read; text is none of its business."""

    @property
    def context(self) -> int:
        """Most tokens that the cache can hold."""
        ...

    @property
    def largest_context(self) -> int:
        """Most tokens that a cache of this model could hold on this machine."""
        ...

    @property
    def ids(self) -> list[int]:
        """The tokens that the cache holds now."""
        ...

    @property
    def vocabulary_size(self) -> int: ...

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Read `ids` after what the cache holds; return the logits (vocabulary,) behind the last of them.

        `progress` is called behind each part that has been read; if it raises, the cache holds what was read.

        Raises:
            EdgeInferError: the engine has been closed.
        """
        ...

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read `ids`; return the logits (len(ids), vocabulary) behind each of them."""
        ...

    def rows(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read `ids`; what the head reads behind each, (len(ids), width) float32.

        Raises:
            EdgeInferError: this engine doesn't give them.
        """
        ...

    def snapshot(self) -> Snapshot | None:
        """What it holds, to go on from another time; None: this engine can't."""
        ...

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """Hold the first `length` tokens of a snapshot. Raises `ValueError` where it doesn't fit."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...

    def choice(self, sampler: Sampler) -> TokenSampler | None:
        """Who chooses this stream's tokens in the engine's stead of the host; None: the host does."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read for one decoded token."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...


@runtime_checkable
class DraftingEngine(Protocol):
    """An engine that may go from token to token by itself."""

    @property
    def most_given(self) -> int:
        """Tokens that `guesses` reads at most before it guesses; 0: it can't."""
        ...

    def guesses(self, ids: Sequence[int], wanted: DraftRequest) -> DraftedTokens:
        """Read `ids`, then guess and read on, as `DraftingBackend.guesses`; it holds what was read."""
        ...


class TextDecoder(Protocol):
    """Ids to text as they come, never half a character."""

    @property
    def pending(self) -> bool:
        """Whether half a character is being held."""
        ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class TextTokenizer(Protocol):
    """Text to ids and back."""

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
        """`restore` is applied to the text between special tokens, after these have been found."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_control(self, token_id: int) -> bool:
        """Whether a token says nothing in an answer, as those that end it."""
        ...

    def stream_decoder(self) -> TextDecoder: ...
