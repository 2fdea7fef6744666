"""Files and processes, on every system: atomic writes, files in use, released pages, living processes."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer_quant_formats.system.files import read_ahead, release_pages, replace_file, write_atomically
from edgeinfer_quant_formats.system.processes import apart_from_terminal, is_alive


def refuse(source: Path, target: Path) -> None:
    raise PermissionError(13, "Access is denied", str(target))


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.json"
    write_atomically(file, "old", ".part")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_atomically(file, "new", ".part")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert file.read_text() == "old"


def test_windows_says_that_a_mapped_file_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match="in use by another program") as failure:
        replace_file(tmp_path / "new", target)
    assert failure.value.filename == str(target)


def test_pages_of_a_mapped_file_are_released_only_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(4 * mmap.PAGESIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert release_pages(data, 1, 3 * mmap.PAGESIZE) == hasattr(mmap, "MADV_DONTNEED")
        assert read_ahead(data, 1, 100) == hasattr(mmap, "MADV_SEQUENTIAL")
        monkeypatch.setattr(sys, "platform", "darwin")
        assert not release_pages(data, 0, mmap.PAGESIZE)


def test_a_process_is_alive_until_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **apart_from_terminal()
    ) as child:
        assert is_alive(child.pid)
        child.communicate(b"\n")
    assert not is_alive(child.pid)
    assert is_alive(os.getpid())
