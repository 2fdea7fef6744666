"""Files: replaced atomically, flushed to disk, and the pages of mapped ones."""

import mmap
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

IN_USE = "in use by another program, which may have mapped it; close that program and try again"


def replace_file(source: Path, target: Path) -> None:
    """Rename a file to `target`, which may exist. Windows refuses it if `target` is open or mapped.

    Raises:
        OSError: it can't be replaced; the message says so if it is in use.
    """
    try:
        os.replace(source, target)
    except PermissionError as error:
        if sys.platform == "win32" and target.exists():
            raise PermissionError(error.errno, IN_USE, str(target)) from None
        raise


def write_atomically(file: Path, text: str, suffix: str = "") -> None:
    """Write a text file: it is the old or the new one at any time. `suffix` ends the temporary file's name.

    Raises:
        OSError: it can't be written; no temporary file is left.
    """
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.", suffix=suffix)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        replace_file(Path(name), file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def sync_folder(folder: Path) -> None:
    """Flush renames in a folder to disk. Windows has no such call: it writes them in order."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def release_pages(data: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Drop the whole pages of a range of a mapped file from memory; a later read loads them again.

    False if the system can't: Windows has no such call, and macOS keeps the pages.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or sys.platform == "darwin":
        return False
    first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        data.madvise(mmap.MADV_DONTNEED, first, end - first)
    return True


def read_ahead(data: mmap.mmap, offset: int, nbytes: int) -> bool:
    """Announce that a range is read in order. False if the system has no such call."""
    if not hasattr(mmap, "MADV_SEQUENTIAL"):
        return False
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    data.madvise(mmap.MADV_SEQUENTIAL, first, offset + nbytes - first)
    return True
