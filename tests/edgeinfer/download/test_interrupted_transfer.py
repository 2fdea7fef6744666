"""Interrupted and concurrent downloads: the partial file is kept and resumed."""

import json
import multiprocessing
import threading
from pathlib import Path

import pytest

from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.partial_file import partial_path
from edgeinfer.download.transfer import DownloadedFile, RetryPolicy, TransferCallbacks, fetch
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.conftest import CONTENT
from tests.edgeinfer.download.fetching import SHA256, downloaded, quick_retries, refusal, remote_of
from tests.edgeinfer.download.hostile_server import HostileServer, Responder


def test_an_interrupted_download_resumes(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    assert "100000 of 300004 bytes are received" in refusal(server, tmp_path, sha256=SHA256)
    assert partial_path(tmp_path / "model.gguf").stat().st_size == 100_000
    server.seen.clear()
    checked: list[tuple[int, int]] = []
    progress = TransferCallbacks(checking=lambda done, total: checked.append((done, total)))
    fetch(remote_of(server, sha256=SHA256), tmp_path / "model.gguf", progress, quick_retries())
    assert server.ranges() == ["100000"]
    assert checked[-1] == (300_004, 300_004)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("responder", [does.serve_file, does.without_length_check])
@pytest.mark.parametrize("tag", ['"two"', ""], ids=["another tag", "no tag"])
def test_a_changed_file_restarts_the_download(
    tag: str, responder: Responder, server: HostileServer, tmp_path: Path
) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.default = b"GGUF" + bytes(250_000), tag, responder
    downloaded(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == server.content


def test_a_changed_file_of_the_same_length_restarts_the_download(
    server: HostileServer, tmp_path: Path
) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.default = CONTENT[:-1] + b"?", '"two"', does.without_length_check
    downloaded(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == server.content


def test_a_file_shorter_than_the_partial_download_restarts_it(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.default = CONTENT[:5000], "", does.without_length_check
    downloaded(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT[:5000]


def test_a_changed_digest_restarts_the_download(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path, sha256="0" * 64)
    server.seen.clear()
    downloaded(server, tmp_path, sha256=SHA256)
    assert server.ranges() == ["0"]


def test_a_download_with_unreadable_metadata_resumes(server: HostileServer, tmp_path: Path) -> None:
    partial = partial_path(tmp_path / "model.gguf")
    partial.write_bytes(CONTENT[:1000])
    partial.with_name(partial.name + ".json").write_text("[1, 2")
    downloaded(server, tmp_path, sha256=SHA256)
    assert server.ranges() == ["1000"]


def test_a_corrupted_partial_download_is_deleted(server: HostileServer, tmp_path: Path) -> None:
    partial_path(tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(996))
    assert "deleted, pull it again" in refusal(server, tmp_path, sha256=SHA256)
    assert list(tmp_path.iterdir()) == []
    downloaded(server, tmp_path, sha256=SHA256)


def test_a_run_killed_after_the_last_byte_needs_no_server(server: HostileServer, tmp_path: Path) -> None:
    partial_path(tmp_path / "model.gguf").write_bytes(CONTENT)
    downloaded(server, tmp_path, sha256=SHA256, size_bytes=len(CONTENT))
    assert server.seen == []


def test_ctrl_c_keeps_the_partial_download(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(150_000), does.stall(0)]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote_of(server), tmp_path / "model.gguf", retry_policy=quick_retries(interrupt))
    assert partial_path(tmp_path / "model.gguf").read_bytes() == CONTENT[:150_000]


def test_concurrent_downloads_of_one_file_leave_one_complete_file(
    server: HostileServer, tmp_path: Path
) -> None:
    server.script = [does.stall(1000), does.cut(9000)]
    result: list[DownloadedFile] = []
    text: list[str] = []
    retry_policy = RetryPolicy(stall_seconds=0.5, poll_seconds=0.01, first_wait=0.01)
    destination = tmp_path / "model.gguf"
    threads = [
        threading.Thread(
            target=lambda: result.append(
                fetch(
                    remote_of(server, sha256=SHA256),
                    destination,
                    TransferCallbacks(say=text.append),
                    retry_policy,
                )
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert destination.read_bytes() == CONTENT
    assert sorted(one.existed for one in result) == [False, True, True, True]
    assert text == ["another program is fetching model.gguf; waiting for it"] * 3
    assert server.ranges() == ["0", "1000", "10000"]


def _fetch_in_child(url: str, destination: Path) -> None:
    retry_policy = RetryPolicy(stall_seconds=5, poll_seconds=0.01)
    fetch(RemoteFile(url, "model.gguf", sha256=SHA256), destination, retry_policy=retry_policy)


@pytest.mark.slow
def test_a_killed_download_is_resumed_by_the_next_process(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.stall(120_000)]
    destination = tmp_path / "model.gguf"
    child = multiprocessing.get_context("spawn").Process(
        target=_fetch_in_child, args=(server.url(), destination)
    )
    child.start()
    reached = threading.Event()
    for _ in range(2000):
        partial = partial_path(destination)
        if partial.exists() and partial.stat().st_size > 0:
            break
        reached.wait(0.01)
    child.kill()
    child.join()
    partial_bytes = partial_path(destination).stat().st_size
    assert 0 < partial_bytes <= 120_000
    downloaded(server, tmp_path, sha256=SHA256)
    assert destination.read_bytes() == CONTENT
    assert server.ranges() == ["0", str(partial_bytes)]


def test_progress_starts_at_the_partial_size(server: HostileServer, tmp_path: Path) -> None:
    partial = partial_path(tmp_path / "model.gguf")
    partial.write_bytes(CONTENT[:1000])
    partial.with_name(partial.name + ".json").write_text(
        json.dumps({"tag": does.TAG, "total": len(CONTENT), "sha256": None})
    )
    seen: list[tuple[int, int | None]] = []
    progress = TransferCallbacks(progress=lambda done, total: seen.append((done, total)))
    fetch(remote_of(server), tmp_path / "model.gguf", progress, quick_retries())
    assert (seen[0], seen[-1]) == ((1000, 300_004), (300_004, 300_004))
