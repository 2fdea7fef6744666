"""Measurements of this machine, stored in one file and discarded if the machine changes."""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgeinfer_kernels.system.locks import file_lock
from edgeinfer_kernels.system.private_folder import ensure_private, remove_older
from edgeinfer_quant_formats.system.files import write_atomically

REVISION = 7
"""Must be raised when the set of measurements, or the method, changes."""
PART = ".part"
MAX_FILE_BYTES = 16 << 20
LOCK_SECONDS = 1.0


class MeasuredFigures:
    """Name -> number, in a file of `folder`; all are discarded if `fingerprint` differs from the file's.

    `most`: how many are kept, those that were kept last; None: all.
    """

    def __init__(
        self, folder: Path, fingerprint: str, file: str = "measured.json", most: int | None = None
    ) -> None:
        self._file, self._most = folder / file, most
        self._fingerprint = f"{REVISION} {fingerprint}"
        self._unwritten: dict[str, float] = {}

    def known(self) -> dict[str, float]:
        """All stored figures; empty if the file is damaged or from another machine."""
        return self._written() | self._unwritten

    def figure(self, name: str, measure: Callable[[], float]) -> float:
        """The figure with this name, measured now if it isn't stored."""
        known = self.known()
        if name not in known:
            self.keep({name: measure()})
            known = self.known() | known
        return known[name]

    def keep(self, figures: dict[str, float]) -> None:
        """Add or replace figures, next to those that other programs store at the same time. If the file can't
        be written, they are kept in memory only.
        """
        try:
            ensure_private(self._file.parent)
            with file_lock(self._file.with_suffix(".lock"), LOCK_SECONDS):
                self._add(figures)
        except OSError:
            self._unwritten |= figures

    def _add(self, figures: dict[str, float]) -> None:
        others = {name: value for name, value in self.known().items() if name not in figures}
        known = others | figures
        if self._most is not None:
            known = dict(list(known.items())[-self._most :])
        content = {"machine": self._fingerprint, "figures": known, "sha256": _digest(known)}
        remove_older(self._file.parent, f"{self._file.name}?*{PART}")
        write_atomically(self._file, json.dumps(content), PART)

    def _written(self) -> dict[str, float]:
        try:
            if not self._file.is_file():  # reading a pipe would block until a writer opens it
                return {}
            with self._file.open("rb") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
            figures = content["figures"]
            if content["machine"] != self._fingerprint or content["sha256"] != _digest(figures):
                return {}
            return {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return {}

    def forget(self) -> None:
        """Discard all figures."""
        self._unwritten = {}
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def _digest(figures: dict[str, float]) -> str:
    """The digest of the figures as they are written."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
