"""A file from a server that truncates, stalls, sends wrong headers or bytes, refuses and redirects."""

import base64
import errno
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from edgeinfer.download import transfer
from edgeinfer.download.http_source import RemoteFile
from edgeinfer.download.partial_file import PartialFile, partial_path
from edgeinfer.download.transfer import TransferCallbacks, fetch, read_start
from edgeinfer.errors import DownloadError
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.conftest import CONTENT
from tests.edgeinfer.download.fetching import SHA256, Waits, downloaded, quick_retries, refusal, remote_of
from tests.edgeinfer.download.hostile_server import HostileServer, Responder


class Case(NamedTuple):
    """The responders of the first requests, and the first byte of each."""

    script: list[Responder]
    ranges: list[str]
    stall_seconds: float = 10.0
    """A timeout long enough for a busy machine, where nothing stalls."""


RECOVERED = {
    "cut three times": Case([does.cut(100_000)] * 2 + [does.cut(1000)], ["0", "100000", "200000", "201000"]),
    "cut before the first byte": Case([does.cut(0)], ["0", "0"]),
    "stalled": Case([does.stall(5000)], ["0", "5000"], stall_seconds=0.5),
    "hung up": Case([does.hang_up], ["0", "0"]),
    "503, then 429": Case([does.status(503), does.status(429)], ["0", "0", "0"]),
    "no ranges": Case([does.without_ranges], ["0"]),
    "cut, then no ranges": Case([does.cut(9000), does.without_ranges], ["0", "9000"]),
    "no ranges and cut": Case([does.without_ranges_cut(9000), does.without_ranges], ["0", "9000"]),
    "in chunks": Case([does.chunked()], ["0"]),
    "in chunks, cut": Case([does.chunked(cut_after=5000)], ["0", "5000"]),
    "no length at all": Case([does.without_length], ["0"]),
    "another range": Case([does.cut(9000), does.from_elsewhere(17)], ["0", "9000", "9000"]),
}


@pytest.mark.default_cases(12)
@pytest.mark.parametrize("case", RECOVERED.values(), ids=list(RECOVERED))
@pytest.mark.parametrize("sha256", [SHA256, None], ids=["sha256 known", "unknown"])
def test_transient_failures_are_retried(
    case: Case, sha256: str | None, server: HostileServer, tmp_path: Path
) -> None:
    server.script = list(case.script)
    remote = remote_of(server, sha256=sha256, digest_source="models.toml" if sha256 else "")
    retry_policy = quick_retries(stall_seconds=case.stall_seconds)
    result = fetch(remote, tmp_path / "model.gguf", retry_policy=retry_policy)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert (result.sha256, result.digest_source) == (SHA256, "models.toml" if sha256 else "")
    assert server.ranges() == case.ranges
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


REFUSED = {
    "401": (does.status(401), "401 Unauthorized; set HF_TOKEN"),
    "403": (does.status(403), "403 Forbidden; set HF_TOKEN"),
    "404": (does.status(404), "404 Not Found; no such file"),
    "418": (does.status(418), "418 I'm a Teapot"),
    "500 for ever": (does.status(500), "given up after 3 attempts without data"),
    "hung up for ever": (does.hang_up, "given up after 3 attempts without data"),
    "another length": (does.claims_total(7), "the server offers 7 bytes, wanted 300004"),
    "a web page": (does.page, "the server offers 1900 bytes, wanted 300004"),
    "packed": (
        lambda request: request.begin(200, 0, Content_Encoding="gzip"),
        "sent compressed (gzip), wanted the file uncompressed",
    ),
    "damaged": (does.corrupt(150_000), f"wanted {SHA256} (models.toml): damaged in transfer"),
}


@pytest.mark.parametrize(("responder", "message"), REFUSED.values(), ids=list(REFUSED))
def test_permanent_failures_give_a_one_line_error(
    responder: Responder, message: str, server: HostileServer, tmp_path: Path
) -> None:
    server.default = responder
    known = {"size_bytes": len(CONTENT), "sha256": SHA256, "digest_source": "models.toml"}
    assert message in refusal(server, tmp_path, login="set HF_TOKEN", **known)


def test_a_web_page_instead_of_a_model_is_detected_at_once(server: HostileServer, tmp_path: Path) -> None:
    server.default = does.page
    assert "the received data is no GGUF file" in refusal(server, tmp_path)
    assert len(server.seen) == 1


@pytest.mark.parametrize("responder", [does.without_ranges, does.without_length, does.chunked()])
def test_an_empty_file_is_refused(responder: Responder, server: HostileServer, tmp_path: Path) -> None:
    server.content, server.default = b"", responder
    assert refusal(server, tmp_path)
    server.default = does.serve_file
    assert "an empty file, wanted a model" in refusal(server, tmp_path)


def test_more_bytes_than_declared_are_refused(server: HostileServer, tmp_path: Path) -> None:
    server.default = does.without_length
    assert "more than the 1000 announced bytes were received" in refusal(server, tmp_path, size_bytes=1000)
    assert list(tmp_path.iterdir()) == []


DIGESTS = {
    "X-Linked-Etag": f'"{SHA256}"',
    "Repr-Digest": f"sha-512=:AAAA:, sha-256=:{base64.b64encode(bytes.fromhex(SHA256)).decode()}:",
}


@pytest.mark.parametrize(("header", "value"), DIGESTS.items(), ids=list(DIGESTS))
def test_the_server_digest_is_verified(
    header: str, value: str, server: HostileServer, tmp_path: Path
) -> None:
    server.headers = {header: value}
    server.script = [does.corrupt(200_000)]
    assert f"wanted {SHA256} ({header}): damaged" in refusal(server, tmp_path)
    assert downloaded(server, tmp_path).digest_source == header


@pytest.mark.parametrize("value", ["sha-256=:AAAA:", "sha-256=:%%%:", "sha-256=x", ""])
def test_an_invalid_digest_is_ignored(value: str, server: HostileServer, tmp_path: Path) -> None:
    server.headers = {"Repr-Digest": value}
    assert downloaded(server, tmp_path).digest_source == ""


def test_a_server_that_contradicts_the_registry_is_refused_before_any_byte_is_stored(
    server: HostileServer, tmp_path: Path
) -> None:
    server.headers = {"X-Linked-Etag": f'"{SHA256}"'}
    text = refusal(server, tmp_path, sha256="0" * 64, digest_source="models.toml")
    assert f"its X-Linked-Etag says sha256 {SHA256}, models.toml says {'0' * 64}" in text
    assert not partial_path(tmp_path / "model.gguf").exists()


def test_a_redirect_is_followed_without_the_token(server: HostileServer, tmp_path: Path) -> None:
    with HostileServer() as hub:
        hub.default = does.redirect(server.url("/cdn"), X_Linked_Etag=f'"{SHA256}"')
        remote = RemoteFile(hub.url(), "model.gguf", headers={"Authorization": "Bearer secret"})
        server.script = [does.cut(1000)]
        result = fetch(remote, tmp_path / "model.gguf", retry_policy=quick_retries())
    assert result.digest_source == "X-Linked-Etag"
    assert [headers.get("Authorization") for _, headers in hub.seen] == ["Bearer secret"] * 2
    assert [(path, headers.get("Authorization")) for path, headers in server.seen] == [("/cdn", None)] * 2


def test_a_redirect_on_the_same_host_keeps_the_token(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.redirect("/moved")]
    downloaded(server, tmp_path, headers={"Authorization": "Bearer secret"})
    assert server.seen[1][0] == "/moved"
    assert server.seen[1][1]["Authorization"] == "Bearer secret"


def test_a_redirect_loop_is_aborted(server: HostileServer, tmp_path: Path) -> None:
    server.default = does.redirect("/model.gguf")
    assert "the server redirects in a loop, or without a target" in refusal(server, tmp_path)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_a_redirect_to_a_file_is_not_followed(target: str, server: HostileServer, tmp_path: Path) -> None:
    server.default = does.redirect(target)
    assert refusal(server, tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nonsense", "http://127.0.0.1:1/a b"])
def test_an_invalid_address_gives_a_one_line_error(url: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError):
        fetch(RemoteFile(url, "model.gguf"), tmp_path / "model.gguf", retry_policy=quick_retries())


def test_retry_delays_double_and_follow_retry_after(server: HostileServer, tmp_path: Path) -> None:
    waits = Waits()
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server.script = [
        does.status(429, Retry_After="7"),
        does.status(503),
        does.status(503, Retry_After=in_a_minute),
        does.status(503, Retry_After="9999"),
        does.status(503, Retry_After="soon"),
    ]
    retry_policy = replace(quick_retries(waits), attempts=9)
    fetch(remote_of(server), tmp_path / "model.gguf", retry_policy=retry_policy)
    assert waits.seconds[:2] == [7, 2]
    assert 25 < waits.seconds[2] <= 30
    assert waits.seconds[3:] == [60, 16]


def test_a_stalled_server_is_reported(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.status(429, Retry_After="7"), does.cut(100_000), does.status(503)]
    text: list[str] = []
    fetch(remote_of(server), tmp_path / "model.gguf", TransferCallbacks(say=text.append), quick_retries())
    assert text == [
        f"{server.url()}: 429 Too Many Requests; again in 7 s",
        f"{server.url()}: 503 Service Unavailable; again in 1 s",
    ]


def test_a_server_that_always_declares_too_much_is_given_up(server: HostileServer, tmp_path: Path) -> None:
    def declare_more(request: does.Request) -> None:
        body = request.content[request.first :]
        if not body:
            request.begin(416, 0)
            return
        total = len(request.content) + 1000
        request.begin(206, len(body) + 1000, Content_Range=f"bytes {request.first}-{total - 1}/{total}")
        request.wfile.write(body)

    server.default = declare_more
    assert "the server announced 301004 bytes, and sends no more than 300004" in refusal(server, tmp_path)


def test_a_failure_before_the_first_byte_leaves_no_file(server: HostileServer, tmp_path: Path) -> None:
    server.default = does.status(404)
    refusal(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_proxy_of_the_environment_is_used(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url(""))
    fetch(RemoteFile("http://models.example/model.gguf", "model.gguf"), tmp_path / "model.gguf")
    assert server.seen[0][0] == "http://models.example/model.gguf"


def test_a_full_disk_is_reported_before_the_request(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=transfer.SPARE_BYTES + 1000)
    monkeypatch.setattr("edgeinfer.download.transfer.shutil.disk_usage", lambda index: usage)
    text = refusal(server, tmp_path)
    assert (
        "0.3 MiB still to download, 64.0 MiB free on that disk, wanted 64.0 MiB more than the download"
        in text
    )
    assert text.endswith("free 0.3 MiB")
    assert not partial_path(tmp_path / "model.gguf").exists()


def test_a_disk_that_fills_up_is_not_retried(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(partial: PartialFile, data: bytes) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(PartialFile, "add", add)
    text = refusal(server, tmp_path)
    assert text == f"{tmp_path}: Disk quota exceeded; partial data is kept: free some space, and pull again"
    assert len(server.seen) == 1


def test_a_large_file_is_downloaded_in_several_ranges(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_bounds(request: does.Request) -> None:
        end = int(request.headers["Range"].split("-")[1]) + 1
        body = request.server.content[request.first : end]
        request.partly(body)
        request.wfile.write(body)

    for module in ("http_source", "transfer"):
        monkeypatch.setattr(f"edgeinfer.download.{module}.MAX_PER_REQUEST", 100_000)
    server.default, waits = in_bounds, Waits()
    fetch(remote_of(server), tmp_path / "model.gguf", retry_policy=quick_retries(waits))
    assert server.ranges() == ["0", "100000", "200000", "300000"]
    assert waits.seconds == []


def test_an_existing_file_is_not_downloaded(server: HostileServer, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"mine")
    assert downloaded(server, tmp_path).existed
    assert server.seen == []


def test_the_start_of_a_file_can_be_requested_alone(server: HostileServer) -> None:
    server.script = [does.status(503), does.hang_up]
    assert read_start(remote_of(server), 1000, quick_retries()) == CONTENT[:1000]
    assert read_start(remote_of(server), 10**9, quick_retries()) == CONTENT
    server.default = does.status(503)
    with pytest.raises(DownloadError, match="given up after 3 attempts"):
        read_start(remote_of(server), 1000, quick_retries())
