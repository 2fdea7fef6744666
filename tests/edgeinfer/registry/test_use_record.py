"""When models were loaded last: a record that damage doesn't break."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from edgeinfer.registry import use_record
from edgeinfer.registry.model_file import ModelFile


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    folder = tmp_path / "state" / "edgeinfer"
    folder.mkdir(parents=True)
    return folder / "last-used.json"


def model(tmp_path: Path, name: str = "model.gguf") -> ModelFile:
    (tmp_path / name).touch()
    return ModelFile(name, tmp_path / name, "path")


@pytest.mark.skipif(sys.platform == "win32", reason="access times are not kept there")
def test_a_model_that_was_never_loaded_has_no_time_whatever_its_access_time(tmp_path: Path) -> None:
    result = model(tmp_path)
    os.utime(result.path, (10**9, 10**9))
    assert result.last_used is None
    before = time.time()
    result.record_use()
    assert result.last_used is not None
    assert before <= result.last_used <= time.time()
    assert result.path.stat().st_atime == result.path.stat().st_mtime == 10**9


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege there")
def test_a_link_and_its_file_are_one_model(tmp_path: Path) -> None:
    result = model(tmp_path)
    (tmp_path / "link.gguf").symlink_to(result.path)
    result.record_use()
    assert use_record.last_used(tmp_path / "link.gguf") == result.last_used


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"a": "b"}', b"[" * 100_000, b"\xff\xfe", b'{"a": NaN}', b" " * (2 << 20)],
    ids=lambda content: str(content[:12]),
)
def test_a_damaged_record_counts_as_empty_and_is_replaced(
    tmp_path: Path, record: Path, content: bytes
) -> None:
    record.write_bytes(content)
    result = model(tmp_path)
    assert result.last_used is None
    result.record_use()
    assert result.last_used is not None


def test_invalid_times_are_ignored(tmp_path: Path, record: Path) -> None:
    names = ("future", "zero", "true", "text")
    times = dict(zip(names, (time.time() + 10**6, 0, True, "1"), strict=True))
    record.write_text(json.dumps({str(model(tmp_path, name).path): at for name, at in times.items()}))
    assert [model(tmp_path, name).last_used for name in names] == [None] * 4


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_record_that_is_not_a_regular_file_is_not_opened(tmp_path: Path, record: Path) -> None:
    os.mkfifo(record)
    result = model(tmp_path)
    assert result.last_used is None
    result.record_use()


def test_a_state_folder_that_cannot_be_created_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    result = model(tmp_path)
    result.record_use()
    assert result.last_used is None


def test_the_record_stays_small(tmp_path: Path, record: Path) -> None:
    record.write_text(json.dumps({f"/model-{number}": number + 1 for number in range(2000)}))
    result = model(tmp_path)
    result.record_use()
    stored = json.loads(record.read_text())
    assert len(stored) == use_record.MAX_MODELS
    assert str(result.path) in stored
    assert "/model-0" not in stored
    assert list(record.parent.iterdir()) == [record]
