"""The file by which the ranks of a process group find each other, while they start."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def group_folder() -> Iterator[str]:
    """The path of a file that doesn't exist yet, in a private folder that is deleted after the context."""
    with tempfile.TemporaryDirectory(prefix="edgeinfer-ranks-", ignore_cleanup_errors=True) as folder:
        yield str(Path(folder) / "store")
