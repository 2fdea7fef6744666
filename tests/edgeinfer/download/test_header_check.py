"""An unsupported model is refused before its weights are downloaded, unless llama.cpp is to run it."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.download.header_check import incoming_model
from edgeinfer.download.pulling import Pull, pull
from edgeinfer.download.transfer import TransferCallbacks
from edgeinfer.errors import DownloadError
from tests.edgeinfer.download.fetching import quick_retries
from tests.edgeinfer.download.hostile_server import HostileServer
from tests.random_models import RandomModel


@pytest.fixture(scope="module")
def valid_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("model") / "sound.gguf"
    return RandomModel("llama", width=256, layers=12, feed_forward=1024).write(path).read_bytes()


def of_architecture(content: bytes, name: bytes) -> bytes:
    length = struct.pack("<Q", 5)
    return content.replace(length + b"llama", length + name)


def of_type(content: bytes, number: int) -> bytes:
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16
    return content[:at] + struct.pack("<I", number) + content[at + 4 :]


def of_tokenizer(content: bytes, name: bytes) -> bytes:
    key = b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 5)
    return content.replace(key + b"llama", key + name)


UNSUPPORTED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "architecture": (lambda content: of_architecture(content, b"dream"), "architecture dream isn't one"),
    "type": (lambda content: of_type(content, 15), "type Q8_K (15) is not supported"),
    "tokenizer": (lambda content: of_tokenizer(content, b"plamo"), "tokenizer.ggml.model: 'plamo'"),
}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(
    case: str, valid_model: bytes, tmp_path: Path
) -> None:
    change, reason = UNSUPPORTED[case]
    settings = Pull(tmp_path, TransferCallbacks(), quick_retries())
    with HostileServer(change(valid_model)) as server:
        received_bytes: list[int] = []
        reporting = replace(
            settings, callbacks=TransferCallbacks(progress=lambda done, total: received_bytes.append(done))
        )
        with pytest.raises(DownloadError) as caught:
            pull(server.url("/m.gguf"), reporting)
        text = str(caught.value)
        assert reason in text
        assert "needs --engine llama.cpp" in text
        assert text.endswith("/m.gguf --engine llama.cpp")
        assert "\n" not in text
        assert max(received_bytes) < len(valid_model) / 4
        assert list(tmp_path.rglob("m.gguf*")) == []
        pulled = pull(server.url("/m.gguf"), replace(settings, engine="llama.cpp"))
        assert pulled.path.stat().st_size == len(valid_model)


def test_a_supported_model_is_downloaded_completely(valid_model: bytes, tmp_path: Path) -> None:
    assert incoming_model(valid_model[:200], "m.gguf") is None
    model = incoming_model(valid_model[:100_000], "m.gguf")
    assert model is not None
    assert model.support.is_native
    assert model.note is None
    with HostileServer(valid_model) as server:
        assert (
            pull(
                server.url("/m.gguf"), Pull(tmp_path, TransferCallbacks(), quick_retries())
            ).path.read_bytes()
            == valid_model
        )


def test_what_few_bits_per_weight_lose_is_printed_before_the_download(tmp_path: Path) -> None:
    model = RandomModel("llama", width=256, feed_forward=1024, formats=("Q2_K",), tied=True)
    path, lines = model.write(tmp_path / "s.gguf"), list[str]()
    with HostileServer(path.read_bytes()) as server:
        pull(server.url("/m.gguf"), Pull(tmp_path, TransferCallbacks(say=lines.append), quick_retries()))
    (line,) = [line for line in lines if "bits per weight" in line]
    assert line.startswith("3.2 bits")
    assert "0.45 with Q2_K (3.2 bits, the same most probable token at 71 % of positions)" in line
