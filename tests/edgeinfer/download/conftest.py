"""A hostile server, and no proxy."""

from collections.abc import Iterator

import pytest

from tests.edgeinfer.download.hostile_server import HostileServer

CONTENT = b"GGUF" + bytes(index * 31 % 251 for index in range(300_000))


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer(CONTENT) as running:
        yield running
