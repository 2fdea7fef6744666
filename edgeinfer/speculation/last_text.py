"""How a text continues the one that was seen before."""

from collections.abc import Sequence


class LastText:
    """The last text that was seen: its length and its last token, by which it is recognized."""

    def __init__(self) -> None:
        self._length, self._token = 0, -1

    def following(self, history: Sequence[int]) -> int | None:
        """How many tokens follow the last text in this one, which is then the last; None: it's another."""
        length, token = self._length, self._token
        self._length, self._token = len(history), history[-1]
        continues = 0 < length <= len(history) and history[length - 1] == token
        return len(history) - length if continues else None
