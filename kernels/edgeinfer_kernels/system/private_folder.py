"""Trusted folders: owned by this user or the system, and not writable by others."""

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MODE = 0o700
DAY = 86400.0
SCRATCH = "scratch-"
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeFolderError(OSError):
    """Another user could have written files into the folder; the message gives the reason."""


def distrust_reason(path: Path) -> str | None:
    """The reason why a file, or files in a folder, could be another user's; None: trusted.

    Raises `OSError`: it does not exist, or cannot be examined.
    """
    if sys.platform == "win32":  # A user's folders are private there.
        return None
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if not _is_trusted(status.st_uid):
            return f"is a symbolic link of user {status.st_uid}"
        status = os.stat(path)
    if not _is_trusted(status.st_uid):
        return f"belongs to user {status.st_uid}, not {os.geteuid()}"
    if status.st_mode & OTHERS_WRITE:
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):o}, wanted {MODE:o})"
    return None


def others_may_read(path: Path) -> bool:
    """Whether other users may read or write a file. A user's folders are private on Windows.

    Raises `OSError`: it does not exist.
    """
    return sys.platform != "win32" and bool(path.lstat().st_mode & 0o077)


def _is_trusted(user: int) -> bool:
    return user in (0, os.geteuid())


def ensure_private(folder: Path) -> None:
    """Create a folder for this user only, if it does not exist.

    Raises:
        UnsafeFolderError: other users can write there.
        OSError: it cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=MODE, exist_ok=True)
    reason = distrust_reason(folder)
    if reason is not None:
        raise UnsafeFolderError(f"{folder} {reason}")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder that is deleted at the end; those of killed programs are deleted after a day."""
    root = temporary_root()
    try:
        ensure_private(root)
    except OSError:
        parent, prefix = None, "edgeinfer-"
    else:
        parent, prefix = root, SCRATCH
        remove_older(root, f"{SCRATCH}*")
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def remove_older(folder: Path, pattern: str, seconds: float = DAY) -> None:
    """Delete files and folders that match `pattern` and were last modified more than `seconds` ago."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            status = path.lstat()
            if time.time() - status.st_mtime < seconds:
                continue
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def temporary_root() -> Path:
    """This user's folder in the system's temporary folder; it may not exist yet."""
    name = "edgeinfer" if sys.platform == "win32" else f"edgeinfer-{os.geteuid()}"
    return Path(tempfile.gettempdir()) / name
