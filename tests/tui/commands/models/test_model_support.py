"""`list`, `show`, `plan` and `run` use the same words for a model that the native engine can't run."""

import json
import struct
from pathlib import Path

import pytest

import edgeinfer as library
from edgeinfer.errors import UnsupportedModelError
from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder, with a valid model, one of an unknown architecture, and one of an unknown type."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    models = tmp_path / "edgeinfer" / "models"
    models.mkdir(parents=True)
    valid = ZOO["llama"].write(models / "sound.gguf")
    content = valid.read_bytes()
    (models / "words.gguf").write_bytes(
        content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv6")
    )
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    (models / "types.gguf").write_bytes(content[:at] + struct.pack("<I", 15) + content[at + 4 :])
    return models


def test_every_command_uses_the_same_words(edgeinfer: CommandLine, folder: Path) -> None:
    words = "needs --engine llama.cpp"
    rows = {line.split()[0]: line for line in edgeinfer("list").out.splitlines()[1:] if line.strip()}
    assert (words in rows["sound"], words in rows["words"], words in rows["types"]) == (False, True, True)
    message = {row["name"]: row["runs_with"] for row in json.loads(edgeinfer("list", "--json").out)}
    assert message["sound"] == "edgeinfer"
    assert message["types"].startswith(f"{words}: tensor blk.0.ffn_up.weight: type Q8_K (15) is not")
    shown = " ".join(edgeinfer("show", "sound").out.split())
    assert "runs with edgeinfer" in shown
    listed = edgeinfer("show", "types", "--tensors").out
    assert "Tensors of types that edgeinfer can't read" in listed
    assert listed.count("blk.0.ffn_up.weight") == 3, listed
    assert json.loads(edgeinfer("show", "types", "--json").out)["unknown_types"] == {
        "blk.0.ffn_up.weight": "Q8_K"
    }
    assert "tensor blk.0.ffn_up.weight: type Q8_K (15) is not" in edgeinfer("plan", "types").err
    for name in ("words", "types"):
        assert words in edgeinfer("show", name).out + edgeinfer("show", name).err
        assert words in edgeinfer("plan", name).err
        with pytest.raises(UnsupportedModelError, match=r"needs --engine|add engine='"):
            library.load(name)


def test_show_lists_the_drafts_next_to_a_model(edgeinfer: CommandLine, folder: Path) -> None:
    (folder / "mtp-sound-Q8_0.gguf").write_bytes(b"GGUF")
    assert json.loads(edgeinfer("show", "sound", "--json").out)["drafts"] == ["mtp-sound-Q8_0.gguf"]
    assert "drafts mtp-sound-Q8_0.gguf" in " ".join(edgeinfer("show", "sound").out.split())
