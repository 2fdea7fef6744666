"""The one protocol that every engine serves and every caller sees."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer.results import Generation, Token

Progress = Callable[[int, int], None]
"""Called during prefill with (tokens done, tokens in all)."""


class Engine(Protocol):
    """Turns token ids into logits and remembers what it has read; text is none of its business."""

    context: int
    """Most tokens that the cache can hold."""
    ids: list[int]
    """The tokens that the cache holds now."""
    vocabulary_size: int

    def append(self, ids: Sequence[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        """Read `ids` after what the cache holds; return the logits (vocabulary,) behind the last of them."""
        ...

    def append_all(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Read `ids`; return the logits (len(ids), vocabulary) behind each of them."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes read for one decoded token."""
        ...

    def close(self) -> None: ...


class TextTokenizer(Protocol):
    """Text to ids and back."""

    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    vocabulary_size: int

    def encode(self, text: str, *, bos: bool = False, special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class LanguageModel(Protocol):
    """Text in, text out."""

    context: int
    tokenizer: TextTokenizer

    def generate(self, prompt: str | Sequence[int], **settings: Any) -> Generation: ...

    def stream(self, prompt: str | Sequence[int], **settings: Any) -> Iterator[Token]: ...

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]: ...

    def close(self) -> None: ...
