"""`pull` of addresses outside the hub, from a server on the loopback."""

import base64
import hashlib
from pathlib import Path

import pytest

from edgeinfer.download.pulling import Pull, pull
from edgeinfer.registry.registry import find_model
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.fake_hub import FakeHub
from tests.edgeinfer.download.test_pulling import OWN, files_of, refusal, write_own
from tests.edgeinfer.download.test_pulling import hub as hub
from tests.edgeinfer.download.test_pulling import models as models
from tests.edgeinfer.download.test_pulling import settings as settings


def test_a_url_outside_the_hub_is_downloaded_without_a_token(
    hub: FakeHub, server: does.HostileServer, settings: Pull, models: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.content = models["Q6_K"]
    pulled = pull(server.url("/files/my%20model.gguf?x=1"), settings)
    assert files_of(pulled, settings) == ["127.0.0.1/my model.gguf"]
    assert (pulled.name, pulled.files[0].digest_source) == ("my model", "")
    assert pulled.files[0].sha256 == hashlib.sha256(models["Q6_K"]).hexdigest()
    assert "Authorization" not in server.seen[0][1]


def test_url_credentials_are_sent_to_that_host_only(settings: Pull, models: dict[str, bytes]) -> None:
    with does.HostileServer(models["Q6_K"]) as server, does.HostileServer(models["Q6_K"]) as other:
        server.script = [does.redirect(other.url("/own.gguf"))]
        pulled = pull(server.url("/own.gguf").replace("//", "//me:p%40ss@"), settings)
        assert pulled.path.parent == settings.models_folder / "127.0.0.1"
        requested = [one.seen[0][1].get("Authorization") for one in (server, other)]
        assert requested == [f"Basic {base64.b64encode(b'me:p@ss').decode()}", None]
        server.script = [does.status(401)]
        output = refusal(server.url("/more.gguf").replace("//", "//me:secret@"), settings)
    assert "the user or password in the address is wrong" in output
    assert "secret" not in output


def test_a_damaged_model_without_a_known_digest_is_deleted(
    server: does.HostileServer, settings: Pull, models: dict[str, bytes]
) -> None:
    server.content = models["Q6_K"][:-1000]
    server.default = does.without_length
    assert refusal(server.url("/x.gguf"), settings).endswith("damaged in transfer, or on the server: deleted")
    assert not (settings.models_folder / "127.0.0.1" / "x.gguf").exists()


def test_a_registry_entry_may_have_its_own_url(
    server: does.HostileServer, settings: Pull, models: dict[str, bytes], tmp_path: Path
) -> None:
    server.content = models["Q6_K"]
    digest = hashlib.sha256(server.content).hexdigest()
    write_own(tmp_path, OWN.replace("URL", server.url()).replace("0" * 64, digest))
    pulled = pull("elsewhere", settings)
    assert (pulled.name, pulled.files[0].digest_source) == ("elsewhere", "models.toml")
    assert find_model("elsewhere", models_folder=settings.models_folder).path == pulled.path
    assert pull("elsewhere", settings).files[0].existed
