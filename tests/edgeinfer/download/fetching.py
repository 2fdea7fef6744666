"""Downloads from a hostile server without waiting."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.transfer import DownloadedFile, RetryPolicy, fetch
from edgeinfer.errors import DownloadError
from tests.edgeinfer.download.conftest import CONTENT
from tests.edgeinfer.download.hostile_server import HostileServer

SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Waits:
    """A clock that only counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def quick_retries(waits: Callable[[float], None] | None = None, stall_seconds: float = 10.0) -> RetryPolicy:
    return RetryPolicy(attempts=3, stall_seconds=stall_seconds, poll_seconds=0.01, sleep=waits or Waits())


def remote_of(server: HostileServer, **known: object) -> RemoteFile:
    return replace(RemoteFile(server.url(), "model.gguf"), **known)  # type: ignore[arg-type]


def downloaded(server: HostileServer, folder: Path, **known: object) -> DownloadedFile:
    return fetch(remote_of(server, **known), folder / "model.gguf", retry_policy=quick_retries())


def refusal(server: HostileServer, folder: Path, **known: object) -> str:
    with pytest.raises(DownloadError) as caught:
        downloaded(server, folder, **known)
    assert "\n" not in str(caught.value)
    assert not (folder / "model.gguf").exists()
    return str(caught.value)
