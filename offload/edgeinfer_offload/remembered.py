"""Figures that were measured on this machine, kept in one file until the machine is another."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgeinfer_kernels.private_folder import ensure_private

REVISION = 5
"""Raised when what is measured, or how, changes."""
PART = ".part"


class RememberedFigures:
    """Name -> number, in `folder`; all are forgotten when `fingerprint` isn't that of the file."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._file = folder / "measured.json"
        self._fingerprint = f"{REVISION} {fingerprint}"
        self._unwritten: dict[str, float] = {}

    def known(self) -> dict[str, float]:
        """What has been measured so far; nothing if the file is damaged, or of another machine."""
        return self._written() | self._unwritten

    def figure(self, name: str, measure: Callable[[], float]) -> float:
        """The figure of that name, measured now if it isn't known."""
        known = self.known()
        if name not in known:
            self.keep({name: measure()})
            known = self.known() | known
        return known[name]

    def keep(self, figures: dict[str, float]) -> None:
        """Add these, or put them in the place of older ones. Where nothing can be written they are known here
        only.
        """
        content = {"machine": self._fingerprint, "figures": self.known() | figures}
        try:
            _replace(self._file, json.dumps(content))
        except OSError:
            self._unwritten |= figures

    def _written(self) -> dict[str, float]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict) or content.get("machine") != self._fingerprint:
            return {}
        figures = content.get("figures")
        if not isinstance(figures, dict):
            return {}
        return {name: float(value) for name, value in figures.items() if _is_number(value)}

    def forget(self) -> None:
        """Know nothing from now on."""
        self._unwritten = {}
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _replace(file: Path, text: str) -> None:
    """Write the file whole or not at all."""
    ensure_private(file.parent)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=PART)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
