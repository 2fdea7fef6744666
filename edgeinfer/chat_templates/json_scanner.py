"""Finds the end of a JSON object in a text that arrives in pieces."""


class JsonObjectScanner:
    """Counts brackets outside of strings; `ended` once the object that began with the first one is closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def take(self, text: str, start: int) -> int:
        """The index after the last character of `text` that belongs to the object, from `start` on."""
        for index in range(start, len(text)):
            if self.ended:
                return index
            self._read(text[index])
        return len(text)

    def _read(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.ended = self._depth <= 0
