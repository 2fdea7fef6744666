"""Limits on the steps and the text of one rendering of a chat template."""

import time
from typing import Any

from jinja2.exceptions import SecurityError

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_CHARACTERS = 16_000_000
"""Base limit; a template may also produce `CHARACTERS_PER_INPUT` for each input character."""
CHARACTERS_PER_INPUT = 64
_ITEM_CHARACTERS = 8
"""Cost of a number, list or dict, in characters."""


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self, input_characters: int) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS + CHARACTERS_PER_INPUT * input_characters
        self._deadline = time.monotonic() + MAX_SECONDS

    def count_step(self, characters: int) -> None:
        """Count one loop iteration whose own text has `characters`.

        Raises:
            SecurityError: too many steps, or the time limit has passed.
        """
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} loop iterations and macro calls")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"still not done after {MAX_SECONDS:g} seconds")
        self.count(characters)

    def count(self, characters: int) -> None:
        """Count characters or list items, if possible before they are created.

        Raises:
            SecurityError: too many.
        """
        self._characters -= characters
        if self._characters < 0:
            raise SecurityError(
                f"more than {MAX_CHARACTERS} characters besides those that the chat accounts for"
            )

    def count_value(self, value: Any, times: int = 1) -> None:
        """Count the size of a value if written out; shared parts count once per reference."""
        if isinstance(value, str):
            self.count(len(value) * max(times, 0))
            return
        open_values = [value]
        while open_values:
            value_part = open_values.pop()
            if isinstance(value_part, str):
                self.count((len(value_part) + 1) * max(times, 0))
                continue
            self.count(_ITEM_CHARACTERS * max(times, 0))
            if isinstance(value_part, dict):
                open_values += [*value_part.keys(), *value_part.values()]
            elif isinstance(value_part, list | tuple):
                open_values += value_part
