"""Windows of scored tokens, by llama.cpp's convention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgeinfer.errors import SettingError

MIN_CONTEXT = 8


@dataclass(frozen=True)
class Window:
    """Tokens processed from an empty KV cache; those from index `first` + 1 on are scored.

    The logits needed are those after tokens `first` to the last but one.
    """

    ids: tuple[int, ...]
    first: int

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.ids[self.first + 1 :]


@dataclass(frozen=True)
class Windows:
    """The windows of a text.

    Consecutive windows of `context` tokens each; the remainder is dropped. The first token of each window is
    replaced by BOS if the model uses one (`bos_id`). Only the second half of a window is scored, so that
    every scored token has at least half a context before it. Source: `perplexity` of llama.cpp's tools,
    without a stride.
    """

    ids: Sequence[int]
    context: int
    bos_id: int | None = None
    max_windows: int | None = None
    """Maximum number of windows; None: all."""

    def __post_init__(self) -> None:
        if self.context < MIN_CONTEXT:
            raise SettingError(f"context: saw {self.context}, wanted at least {MIN_CONTEXT}")
        if self.max_windows is not None and self.max_windows < 1:
            raise SettingError(
                f"chunks: saw {self.max_windows}, wanted a whole number of at least 1, or None"
            )
        if not len(self):
            raise SettingError(
                f"the text has {len(self.ids)} tokens, wanted at least {self.context} for one window; "
                "give a longer text or a smaller context (context=)"
            )

    def __len__(self) -> int:
        count = len(self.ids) // self.context
        return count if self.max_windows is None else min(count, self.max_windows)

    def __iter__(self) -> Iterator[Window]:
        for index in range(len(self)):
            ids = list(self.ids[index * self.context : (index + 1) * self.context])
            if self.bos_id is not None:
                ids[0] = self.bos_id
            yield Window(tuple(ids), self.context // 2)
