"""The error for a folder that can't be read as a model."""

from pathlib import Path

from edgeinfer.errors import UnsupportedModelError, shortened


class FolderError(UnsupportedModelError):
    """A folder of a model that isn't supported, or is incomplete."""


def folder_error(folder: Path, problem: str) -> FolderError:
    """The error in one line."""
    return FolderError(f"{shortened(str(folder), 200)}: {problem}")
