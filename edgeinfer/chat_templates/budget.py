"""How much work and text one rendering of a chat template may make."""

import time
from typing import Any

from jinja2.exceptions import SecurityError

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_CHARACTERS = 16_000_000
"""Beside these, a template may make `CHARACTERS_PER_INPUT` for each character that it is given."""
CHARACTERS_PER_INPUT = 64
_ITEM_CHARACTERS = 8
"""A number, list or dict weighs as much as so many characters."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, input_characters: int) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS + CHARACTERS_PER_INPUT * input_characters
        self._deadline = time.monotonic() + MAX_SECONDS

    def count_step(self, characters: int) -> None:
        """Count one turn of a loop whose own text has `characters`.

        Raises:
            SecurityError: too many, or too late.
        """
        self._steps -= 1
        if self._steps < 0:
            raise SecurityError(f"more than {MAX_STEPS} loop turns and macro calls")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"still not done after {MAX_SECONDS:g} seconds")
        self.count(characters)

    def count(self, characters: int) -> None:
        """Count text or list items, best before they are made.

        Raises:
            SecurityError: too many.
        """
        self._characters -= characters
        if self._characters < 0:
            raise SecurityError(
                f"more than {MAX_CHARACTERS} characters made beside what the chat accounts for"
            )

    def count_value(self, value: Any, times: int = 1) -> None:
        """Count all that a value would come to if written out, shared parts once for each mention."""
        if isinstance(value, str):
            self.count(len(value) * max(times, 0))
            return
        open_values = [value]
        while open_values:
            found = open_values.pop()
            if isinstance(found, str):
                self.count((len(found) + 1) * max(times, 0))
                continue
            self.count(_ITEM_CHARACTERS * max(times, 0))
            if isinstance(found, dict):
                open_values += [*found.keys(), *found.values()]
            elif isinstance(found, list | tuple):
                open_values += found
