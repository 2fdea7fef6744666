"""Settings and model files that a user writes: every mistake gives one line, none a hang."""

import os
from pathlib import Path

import pytest

from edgeinfer.errors import RegistryError
from edgeinfer.registry.entries import read_registry
from edgeinfer.registry.toml_files import MAX_BYTES, TomlError, read_toml

HOSTILE = {
    "deep arrays": b"a = " + b"[" * 100_000,
    "deep tables": b"a = " + b"{b = " * 100_000,
    "dotted": b".".join([b"a"] * 50_000) + b" = 1",
    "not UTF-8": b"a = '\xff'",
    "no TOML": b"a = = 1",
    "a date that isn't": b"a = 2026-13-45",
    "a huge number": b"a = " + b"9" * 100_000,
    "control characters": b"a = '\x00'",
    "long": b"#" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_gives_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(content)
    try:
        read_toml(path)
    except TomlError as error:
        text = str(error)
        assert text.startswith(f"{path}: ")
        assert len(text) < 500
        assert "\n" not in text
    with pytest.raises(RegistryError) as caught:
        read_registry(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "content",
    ["a = 5", "[a]\nfile = 5", "[a]\nfile = 'x'\nquants = [1]", "[[a]]\nfile = 'x'"]
    + [
        f"[a]\nfile = 'x'\n{key} = {'[' * 50 + ']' * 50}"
        for key in ("context", "sha256", "repository", "notes")
    ],
)
def test_entries_of_the_wrong_type_give_a_one_line_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(content)
    with pytest.raises(RegistryError, match=r"saw|no such|file|wanted"):
        read_registry(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names there")
def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "models.toml")
    with pytest.raises(RegistryError, match="no regular file, wanted one in TOML"):
        read_registry(tmp_path / "models.toml")
    with pytest.raises(TomlError, match="no regular file"):
        read_toml(Path("/dev/zero"))
