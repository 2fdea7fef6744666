"""The output of a batch: one row for each line, appended when it is complete."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edgeinfer.errors import SettingError
from edgeinfer_kernels.system.locks import LockTimeoutError, file_lock

PIECE_BYTES = 1 << 16


class BatchOutput:
    """A context manager that appends rows to a file and holds its lock. `done`: ids of the rows in it.

    A row is written with one call, so a killed program leaves at most one partial row, at the end: the next
    one removes it and computes it again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = file_lock(path.with_name(f".{path.name}.lock"), limit_seconds=0, is_removed=True)
        self.done: set[str] = set()

    def __enter__(self) -> Self:
        """Raises `SettingError`: another program writes the file, or it has other lines."""
        try:
            self._lock.__enter__()
        except LockTimeoutError as error:
            raise SettingError(f"{self._path}: another batch writes it ({error})") from error
        try:
            self._file = self._path.open("a+b", buffering=0)
            self._remove_partial_row()
            self._read_rows()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def _remove_partial_row(self) -> None:
        """Cut the file after its last newline."""
        end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - PIECE_BYTES)
            self._file.seek(begin)
            newline = self._file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                self._file.truncate(begin + newline + 1)
                return
            end = begin
        self._file.truncate(0)

    def _read_rows(self) -> None:
        self._file.seek(0)
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                self.done.add(self._row_id(number, raw))

    def _row_id(self, number: int, raw: bytes) -> str:
        try:
            row_id = json.loads(raw)["id"]
            if isinstance(row_id, str):
                return row_id
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise SettingError(
            f"{self._path}: line {number} is no row of a batch; name another file for the output"
        )

    def check_lines(self, ids: Collection[str]) -> None:
        """Raise `SettingError` if a row is that of another line."""
        if others := self.done.difference(ids):
            raise SettingError(
                f"{self._path}: {len(others)} of its rows, as {min(others)}, are of lines that the input "
                "doesn't have (or no longer has); name another file for the output"
            )

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        text = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        written = 0
        while written < len(text):
            written += self._file.write(text[written:]) or 0
        self.done.add(row["id"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        self._lock.__exit__(kind, error, trace)
