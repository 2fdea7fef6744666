"""A response without a length ends where the model file's header declares its end."""

from pathlib import Path

import pytest

from edgeinfer.download import transfer
from edgeinfer.download.pulling import Pull, pull
from edgeinfer.download.transfer import TransferCallbacks
from edgeinfer.errors import DownloadError
from edgeinfer_quant_formats.gguf.header_length import declared_bytes
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.fetching import downloaded, quick_retries, refusal
from tests.edgeinfer.download.hostile_server import HostileServer
from tests.random_models import RandomModel

MANY = 64 << 20


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return RandomModel("llama", width=128, layers=2).write(tmp_path / "whole.gguf").read_bytes()


def test_the_header_gives_the_length_of_a_file(model: bytes) -> None:
    assert declared_bytes(model, "m") == len(model)
    assert declared_bytes(model[:100_000], "m") == len(model)
    for short in (b"", b"GGUF", model[:24], model[:200], model[:5000], b"none" + model[4:]):
        assert declared_bytes(short, "m") is None


def test_an_endless_response_is_aborted(model: bytes, server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.endless(model, MANY)]
    text = refusal(server, tmp_path)
    assert f"received more than the {len(model)} bytes that the file's own header declares; deleted" in text
    assert not list(tmp_path.glob("model.gguf*"))


def test_an_endless_response_without_a_header_is_aborted(
    model: bytes, server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_HEADER_BYTES", 1 << 20)
    server.script = [does.endless(b"GGUF" + b"\xff" * 100_000, MANY)]
    assert "no whole GGUF header in the first 1 MiB" in refusal(server, tmp_path)
    assert not list(tmp_path.glob("model.gguf*"))


def test_a_valid_chunked_response_is_complete(model: bytes, tmp_path: Path) -> None:
    with HostileServer(model) as server:
        server.script = [does.chunked()]
        assert downloaded(server, tmp_path).path.read_bytes() == model


@pytest.mark.parametrize(
    "address",
    [
        "http://[::1",
        "http://[::1/model.gguf",
        "https://host:99999/model.gguf",
        "https://host:port/model.gguf",
        "http://127.0.0.1:1/a%00.gguf",
        "http://127.0.0.1:1/%1b[2J.gguf",
        "hf:owner/na\0me",
        "\0",
    ],
)
def test_an_invalid_url_gives_a_one_line_error(address: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        pull(address, Pull(tmp_path, TransferCallbacks(), quick_retries()))
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []
