"""The last line: context use, generation speed, share of draft tokens accepted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Static

from edgeinfer_tui.output.status_line import context_used

if TYPE_CHECKING:
    from edgeinfer.results import Generation

BAR = 8


def status_text(
    width: int, used: int | None, context: int, answer: "Generation | None", tail: Sequence[str] = ()
) -> str:
    """Status fields in order of priority, as many as fit `width` columns; `tail`: hints shown if they fit."""
    count = "-" if used is None else str(used)
    parts = [f"{count}/{context} tokens"] if context else ["no model yet"]
    if answer is not None:
        rate = answer.speed.decode_tokens_per_second
        if rate > 0:
            parts.append(f"{rate:.1f} t/s" if rate < 10 else f"{rate:.0f} t/s")
        if answer.speed.accepted_share is not None:
            parts.append(f"drafts {answer.speed.accepted_share:.0%}")
    parts += tail
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 3 + len(part) > width - 2:
            break
        text += f" · {part}"
    if used is not None and context and len(text) + BAR + 3 <= width - 2:
        text = f"{_bar(used / context)} {text}"
    return text


def keys_text(width: int, keys: Sequence[str]) -> str:
    """Keys with descriptions, as many as fit `width` columns; the last one, which goes back, is always
    shown.
    """
    shown = list(keys)
    while len(shown) > 1 and len(" · ".join(shown)) > width - 2:
        del shown[-2]
    return " · ".join(shown)


def _bar(share: float) -> str:
    full = min(BAR, round(share * BAR))
    return f"[{'#' * full}{'.' * (BAR - full)}]"


class StatusBar(Static):
    """The status line."""

    def __init__(self) -> None:
        super().__init__(id="status", markup=False)
        self._state: tuple[int | None, int, Generation | None, Sequence[str]] = (None, 0, None, ())
        self._keys: Sequence[str] = ()

    def show(
        self, answer: "Generation | None", context: int, tail: Sequence[str] = (), used: int | None = None
    ) -> None:
        """`used`: tokens in the context; None: taken from `answer`."""
        taken = used if answer is None else context_used(answer)
        self._state, self._keys = (taken, context, answer, tail), ()
        self._draw()

    def show_keys(self, keys: Sequence[str]) -> None:
        """Show the keys of the focused message instead, as many as fit."""
        self._keys = keys
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._keys:
            self.update(Content(keys_text(self.size.width, self._keys)))
            return
        used, context, answer, tail = self._state
        self.update(Content(status_text(self.size.width, used, context, answer, tail)))
