"""Intermediate results of a long run in a folder, so that an interrupted run can continue."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SettingError
from edgeinfer_offload.runtime.activity_profile import model_hash
from edgeinfer_quant_formats import GGUFFile

KEY_FILE = "run.txt"

Arrays = dict[str, npt.NDArray[Any]]


class Checkpoint:
    """A folder with the results of a run.

    `key` is what the results depend on. A folder of another key is emptied; a folder of something else is
    refused. Each result is written completely or not at all.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self._key = key
        found = self._stored_key()
        if found is not None and found != key:
            self.remove()

    def _stored_key(self) -> str | None:
        if not self.folder.exists():
            return None
        try:
            return (self.folder / KEY_FILE).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise SettingError(
                f"{self.folder}: holds no {KEY_FILE}, wanted the intermediate results of a run; "
                "move it, or write to another file"
            ) from None

    def load(self, name: str) -> Arrays | None:
        """The arrays of a result; None if there is none, or if it is damaged."""
        try:
            with np.load(self._path(name), allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
        except (OSError, ValueError, EOFError):
            return None

    def store(self, name: str, arrays: Arrays) -> None:
        """Store the arrays of a result. Raises `OSError`: the disk is full."""
        with self._written(self._path(name)) as stream:
            np.savez(stream, allow_pickle=False, **arrays)

    def mapped(self, name: str) -> npt.NDArray[Any] | None:
        """The large array of a result, which stays on the disk; None as for `load`."""
        try:
            return np.asarray(np.load(self._path(name, ".npy"), mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError):
            return None

    def store_mapped(self, name: str, array: npt.NDArray[Any]) -> None:
        """Store an array for `mapped`. Raises `OSError`: the disk is full."""
        with self._written(self._path(name, ".npy")) as stream:
            np.save(stream, array, allow_pickle=False)

    @contextmanager
    def _written(self, path: Path) -> Iterator[BinaryIO]:
        """A stream whose file gets its name when it is complete."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            (self.folder / KEY_FILE).write_text(self._key, "utf-8")
        made = self.folder / f"{secrets.token_hex(8)}.new"
        try:
            with made.open("wb") as stream:
                yield stream
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete all results."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, name: str, suffix: str = ".npz") -> Path:
        # Tensor names come from the file: a digest is a file name on any system.
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
        return self.folder / (digest[:32] + suffix)


def partial_folder(target: Path) -> Path:
    """The folder for the results of a run that writes `target`."""
    return target.with_name(target.name + ".partial")


def run_key(*parts: object) -> str:
    """A digest of all that the results of a run depend on."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def file_key(file: GGUFFile) -> str:
    """A fingerprint of the files of an open model."""
    return run_key([(part.name, model_hash(part)) for part in file.parts])
