"""Standard output and standard error of the program.

Text from files, servers and models is untrusted: on a terminal every control character in it is replaced, so
that it can't move the cursor, set colors, change the title or write the clipboard. The program's own control
sequences are written with `control` and contain no data. Output to a pipe or a file is not changed.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from edgeinfer_tui.system.terminal_calls import console_encoding

CONTROL_REPLACEMENTS = {code: "�" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}
"""For `str.translate`: C0 except tab and newline, DEL and C1 become a replacement character."""


class OutputStream(io.TextIOBase):
    """A text stream over standard output or standard error; `required`: a failed write is an error."""

    def __init__(self, stream: TextIO, *, required: bool) -> None:
        self._stream = stream
        self._required = required
        self._on_terminal = stream.isatty()
        self._control_allowed = False

    def write(self, text: str) -> int:
        """Write text; on a terminal control characters are replaced."""
        filtered = self._on_terminal and not self._control_allowed
        return self._write(text.translate(CONTROL_REPLACEMENTS) if filtered else text)

    def control(self, sequence: str) -> None:
        """Write one of the program's control sequences to a terminal."""
        if self._on_terminal:
            self._write(sequence)

    @contextmanager
    def control_allowed(self) -> Iterator[None]:
        """Allow control sequences while a library such as rich formats our constant text, as in help."""
        self._control_allowed = True
        try:
            yield
        finally:
            self._control_allowed = False

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        return self._on_terminal

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def close(self) -> None:
        """Do nothing: the interpreter owns the stream and closes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def _attempt(self, operation: Any) -> None:
        """Ignore failed writes of messages; a failed write of output raises."""
        try:
            operation()
        except (OSError, ValueError):
            if self._required:
                raise
            discard(self._stream)


class ClosedOutput(io.TextIOBase):
    """Standard output that the caller has closed: the first write fails, as on a full disk."""

    encoding = "utf-8"
    errors = "replace"

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "standard output is closed; wanted a terminal, a file or a pipe")
        return 0

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 1


def control(stream: TextIO, sequence: str) -> None:
    """Write one of the program's control sequences to a stream that may be an `OutputStream`."""
    if isinstance(stream, OutputStream):
        stream.control(sequence)
    else:
        stream.write(sequence)


@contextmanager
def help_output() -> Iterator[None]:
    """Allow colors in help output: it contains only the program's constant text."""
    out = sys.stdout
    if isinstance(out, OutputStream):
        with out.control_allowed():
            yield
    else:
        yield


@contextmanager
def guarded_output() -> Iterator[None]:
    """Replace `sys.stdout` and `sys.stderr` by safe streams inside the context."""
    before = sys.stdout, sys.stderr
    out, err = before
    for stream in (sys.stdin, *before):
        if isinstance(stream, io.TextIOWrapper):
            # Characters missing in the terminal's encoding become a question mark, invalid bytes a �.
            stream.reconfigure(encoding=console_encoding(stream), errors="replace")
    sys.stdout = cast(TextIO, OutputStream(out or cast(TextIO, ClosedOutput()), required=True))
    sys.stderr = cast(TextIO, OutputStream(err or io.StringIO(), required=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def reserve_standard_descriptors() -> None:
    """Open the null device as descriptors 0, 1 and 2 if the caller has closed them.

    Otherwise files opened later would get these numbers, and native code that prints would write into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def discard(stream: TextIO | None) -> None:
    """Redirect buffered and later output to the null device, since the stream can't be written."""
    if stream is None:
        return
    with suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)
