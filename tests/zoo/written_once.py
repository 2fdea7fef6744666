"""Files of random models, which this process writes once each and copies afterwards."""

import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_KNOWN: dict[bytes, tuple[object, Path]] = {}
"""The fields of a model -> the model, which keeps the ids of its parts from another use, and its file."""


@cache
def _folder() -> "TemporaryDirectory[str]":
    """The files, until this process ends."""
    return TemporaryDirectory(prefix="edgeinfer-models-")


def written_once(model: object, path: Path, write: Callable[[Path], Any]) -> None:
    """A file of the model's class and fields at `path`; fields that contain functions count by identity."""
    parts = []
    for name, value in vars(model).items():
        try:
            parts.append(pickle.dumps((name, value)))
        except (AttributeError, pickle.PicklingError):
            parts.append(f"{name} {id(value)}".encode())
    key = pickle.dumps((id(type(model)), parts))
    if key not in _KNOWN:
        first = Path(_folder().name) / f"{len(_KNOWN)}.gguf"
        write(first)
        _KNOWN[key] = model, first
    copy = path.with_name(f"{path.name}.copy")
    shutil.copyfile(_KNOWN[key][1], copy)
    copy.replace(path)  # Another model may still have the old file mapped.
