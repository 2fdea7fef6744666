"""A file from a server that cuts, stalls, lies, damages, refuses and redirects."""

import base64
import hashlib
import json
import multiprocessing
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from edgeinfer.download import transfer
from edgeinfer.download.partial_file import partial_path
from edgeinfer.download.remote_file import RemoteFile
from edgeinfer.download.transfer import Fetched, Hearing, Patience, fetch, read_start
from edgeinfer.errors import DownloadError
from tests.edgeinfer.download import hostile_server as does
from tests.edgeinfer.download.conftest import CONTENT
from tests.edgeinfer.download.hostile_server import Behaviour, HostileServer

SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Waits:
    """A clock that only counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def hasty(waits: Callable[[float], None] | None = None, stall_seconds: float = 10.0) -> Patience:
    return Patience(attempts=3, stall_seconds=stall_seconds, poll_seconds=0.01, sleep=waits or Waits())


def remote_of(server: HostileServer, **known: object) -> RemoteFile:
    return replace(RemoteFile(server.url(), "model.gguf"), **known)  # type: ignore[arg-type]


def fetched(server: HostileServer, folder: Path, **known: object) -> Fetched:
    return fetch(remote_of(server, **known), folder / "model.gguf", patience=hasty())


def refusal(server: HostileServer, folder: Path, **known: object) -> str:
    with pytest.raises(DownloadError) as caught:
        fetched(server, folder, **known)
    assert "\n" not in str(caught.value)
    assert not (folder / "model.gguf").exists()
    return str(caught.value)


class Case(NamedTuple):
    """What happens to the first requests, and where each of them begins."""

    script: list[Behaviour]
    ranges: list[str]
    stall_seconds: float = 10.0
    """Where nothing stalls, a busy machine shall not look as if it did."""


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


@pytest.mark.parametrize("case", RECOVERED.values(), ids=list(RECOVERED))
@pytest.mark.parametrize("sha256", [SHA256, None], ids=["sha256 known", "unknown"])
def test_what_may_pass_is_overcome(
    case: Case, sha256: str | None, server: HostileServer, tmp_path: Path
) -> None:
    server.script = list(case.script)
    remote = remote_of(server, sha256=sha256, vouched_by="models.toml" if sha256 else "")
    patience = hasty(stall_seconds=case.stall_seconds)
    found = fetch(remote, tmp_path / "model.gguf", patience=patience)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert (found.sha256, found.vouched_by) == (SHA256, "models.toml" if sha256 else "")
    assert server.ranges() == case.ranges
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


REFUSED = {
    "401": (does.status(401), "401 Unauthorized; set HF_TOKEN"),
    "403": (does.status(403), "403 Forbidden; set HF_TOKEN"),
    "404": (does.status(404), "404 Not Found; nothing of that name is there"),
    "418": (does.status(418), "418 I'm a Teapot"),
    "500 for ever": (does.status(500), "given up after 3 attempts without a byte"),
    "hung up for ever": (does.hang_up, "given up after 3 attempts without a byte"),
    "another length": (does.claims_total(7), "the server offers 7 bytes, wanted 300004"),
    "a web page": (does.page, "the server offers 1900 bytes, wanted 300004"),
    "packed": (
        lambda request: request.begin(200, 0, Content_Encoding="gzip"),
        "sent packed (gzip), wanted the file as it is",
    ),
    "damaged": (does.corrupt(150_000), f"models.toml says {SHA256}: damaged on the way"),
}


@pytest.mark.parametrize(("behaviour", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_will_not_pass_is_one_line(
    behaviour: Behaviour, message: str, server: HostileServer, tmp_path: Path
) -> None:
    server.otherwise = behaviour
    known = {"size_bytes": len(CONTENT), "sha256": SHA256, "vouched_by": "models.toml"}
    assert message in refusal(server, tmp_path, login="set HF_TOKEN", **known)


def test_a_web_page_in_place_of_a_model_is_noticed_at_once(server: HostileServer, tmp_path: Path) -> None:
    server.otherwise = does.page
    assert "no GGUF file lies there, but something else" in refusal(server, tmp_path)
    assert len(server.seen) == 1


@pytest.mark.parametrize("behaviour", [does.without_ranges, does.without_length, does.chunked()])
def test_an_empty_file_is_refused(behaviour: Behaviour, server: HostileServer, tmp_path: Path) -> None:
    server.content, server.otherwise = b"", behaviour
    assert refusal(server, tmp_path)
    server.otherwise = does.honest
    assert "an empty file, wanted a model" in refusal(server, tmp_path)


def test_more_bytes_than_promised_are_refused(server: HostileServer, tmp_path: Path) -> None:
    server.otherwise = does.without_length
    assert "more than the 1000 bytes promised came" in refusal(server, tmp_path, size_bytes=1000)
    assert list(tmp_path.iterdir()) == []


def test_what_came_is_kept_and_the_next_run_goes_on_with_it(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    assert "100000 of 300004 bytes are here" in refusal(server, tmp_path, sha256=SHA256)
    assert partial_path(tmp_path / "model.gguf").stat().st_size == 100_000
    server.seen.clear()
    checked: list[tuple[int, int]] = []
    hearing = Hearing(checking=lambda done, total: checked.append((done, total)))
    fetch(remote_of(server, sha256=SHA256), tmp_path / "model.gguf", hearing, hasty())
    assert server.ranges() == ["100000"]
    assert checked[-1] == (300_004, 300_004)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("behaviour", [does.honest, does.careless])
@pytest.mark.parametrize("tag", ['"two"', ""], ids=["another tag", "no tag"])
def test_a_file_that_changed_between_two_runs_begins_anew(
    tag: str, behaviour: Behaviour, server: HostileServer, tmp_path: Path
) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.otherwise = b"GGUF" + bytes(250_000), tag, behaviour
    fetched(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == server.content


def test_a_file_of_the_same_length_that_changed_begins_anew(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.otherwise = CONTENT[:-1] + b"?", '"two"', does.careless
    fetched(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == server.content


def test_a_file_that_became_shorter_than_what_came_begins_anew(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path)
    server.content, server.tag, server.otherwise = CONTENT[:5000], "", does.careless
    fetched(server, tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT[:5000]


def test_another_digest_than_the_one_that_came_in_part_begins_anew(
    server: HostileServer, tmp_path: Path
) -> None:
    server.script = [does.cut(100_000), *[does.status(500)] * 3]
    refusal(server, tmp_path, sha256="0" * 64)
    server.seen.clear()
    fetched(server, tmp_path, sha256=SHA256)
    assert server.ranges() == ["0"]


def test_facts_that_cannot_be_read_cost_nothing_but_trust(server: HostileServer, tmp_path: Path) -> None:
    partial = partial_path(tmp_path / "model.gguf")
    partial.write_bytes(CONTENT[:1000])
    partial.with_name(partial.name + ".json").write_text("[1, 2")
    fetched(server, tmp_path, sha256=SHA256)
    assert server.ranges() == ["1000"]


def test_a_poisoned_part_is_thrown_away_in_the_end(server: HostileServer, tmp_path: Path) -> None:
    partial_path(tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(996))
    assert "thrown away, pull it again" in refusal(server, tmp_path, sha256=SHA256)
    assert list(tmp_path.iterdir()) == []
    fetched(server, tmp_path, sha256=SHA256)


def test_a_run_killed_behind_the_last_byte_needs_no_server(server: HostileServer, tmp_path: Path) -> None:
    partial_path(tmp_path / "model.gguf").write_bytes(CONTENT)
    fetched(server, tmp_path, sha256=SHA256, size_bytes=len(CONTENT))
    assert server.seen == []


DIGESTS = {
    "X-Linked-Etag": f'"{SHA256}"',
    "Repr-Digest": f"sha-512=:AAAA:, sha-256=:{base64.b64encode(bytes.fromhex(SHA256)).decode()}:",
}


@pytest.mark.parametrize(("header", "value"), DIGESTS.items(), ids=list(DIGESTS))
def test_a_digest_that_the_server_gives_is_checked(
    header: str, value: str, server: HostileServer, tmp_path: Path
) -> None:
    server.headers = {header: value}
    server.script = [does.corrupt(200_000)]
    assert f"{header} says {SHA256}: damaged" in refusal(server, tmp_path)
    assert fetched(server, tmp_path).vouched_by == header


@pytest.mark.parametrize("value", ["sha-256=:AAAA:", "sha-256=:%%%:", "sha-256=x", ""])
def test_a_digest_that_is_none_is_no_digest(value: str, server: HostileServer, tmp_path: Path) -> None:
    server.headers = {"Repr-Digest": value}
    assert fetched(server, tmp_path).vouched_by == ""


def test_a_server_that_contradicts_the_catalogue_is_refused_before_a_byte_is_kept(
    server: HostileServer, tmp_path: Path
) -> None:
    server.headers = {"X-Linked-Etag": f'"{SHA256}"'}
    said = refusal(server, tmp_path, sha256="0" * 64, vouched_by="models.toml")
    assert f"its X-Linked-Etag says sha256 {SHA256}, models.toml says {'0' * 64}" in said
    assert partial_path(tmp_path / "model.gguf").stat().st_size == 0


def test_a_redirect_is_followed_without_the_token(server: HostileServer, tmp_path: Path) -> None:
    with HostileServer() as hub:
        hub.otherwise = does.redirect(server.url("/cdn"), X_Linked_Etag=f'"{SHA256}"')
        remote = RemoteFile(hub.url(), "model.gguf", headers={"Authorization": "Bearer secret"})
        server.script = [does.cut(1000)]
        found = fetch(remote, tmp_path / "model.gguf", patience=hasty())
    assert found.vouched_by == "X-Linked-Etag"
    assert [headers.get("Authorization") for _, headers in hub.seen] == ["Bearer secret"] * 2
    assert [(path, headers.get("Authorization")) for path, headers in server.seen] == [("/cdn", None)] * 2


def test_a_redirect_on_the_same_host_keeps_the_token(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.redirect("/moved")]
    fetched(server, tmp_path, headers={"Authorization": "Bearer secret"})
    assert server.seen[1][0] == "/moved"
    assert server.seen[1][1]["Authorization"] == "Bearer secret"


def test_a_redirect_in_circles_ends(server: HostileServer, tmp_path: Path) -> None:
    server.otherwise = does.redirect("/model.gguf")
    assert "the server leads in circles or nowhere" in refusal(server, tmp_path)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_a_redirect_to_a_file_is_not_followed(target: str, server: HostileServer, tmp_path: Path) -> None:
    server.otherwise = does.redirect(target)
    assert refusal(server, tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nonsense", "http://127.0.0.1:1/a b"])
def test_an_address_that_is_none_is_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError):
        fetch(RemoteFile(url, "model.gguf"), tmp_path / "model.gguf", patience=hasty())


def test_the_wait_doubles_and_a_server_may_ask_for_its_own(server: HostileServer, tmp_path: Path) -> None:
    waits = Waits()
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server.script = [
        does.status(429, Retry_After="7"),
        does.status(503),
        does.status(503, Retry_After=in_a_minute),
        does.status(503, Retry_After="9999"),
        does.status(503, Retry_After="soon"),
    ]
    patience = replace(hasty(waits), attempts=9)
    fetch(remote_of(server), tmp_path / "model.gguf", patience=patience)
    assert waits.seconds[:2] == [7, 2]
    assert 25 < waits.seconds[2] <= 30
    assert waits.seconds[3:] == [60, 16]


def test_a_proxy_of_the_environment_is_asked(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url(""))
    fetch(RemoteFile("http://models.example/model.gguf", "model.gguf"), tmp_path / "model.gguf")
    assert server.seen[0][0] == "http://models.example/model.gguf"


def test_a_full_disk_is_told_before_a_byte_is_asked_for(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=transfer.SPARE_BYTES + 1000)
    monkeypatch.setattr("edgeinfer.download.transfer.shutil.disk_usage", lambda place: usage)
    said = refusal(server, tmp_path)
    assert "GiB still to come, 0.06 GiB free on that disk; make room for" in said
    assert partial_path(tmp_path / "model.gguf").stat().st_size == 0


def test_ctrl_c_keeps_what_came(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.cut(150_000), does.stall(0)]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(remote_of(server), tmp_path / "model.gguf", patience=hasty(interrupt))
    assert partial_path(tmp_path / "model.gguf").read_bytes() == CONTENT[:150_000]


def test_a_file_larger_than_one_answer_may_be_comes_in_several(
    server: HostileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_bounds(request: does.Request) -> None:
        end = int(request.headers["Range"].split("-")[1]) + 1
        body = request.server.content[request.first : end]
        request.partly(body)
        request.wfile.write(body)

    for module in ("http_source", "transfer"):
        monkeypatch.setattr(f"edgeinfer.download.{module}.MOST_PER_REQUEST", 100_000)
    server.otherwise, waits = in_bounds, Waits()
    fetch(remote_of(server), tmp_path / "model.gguf", patience=hasty(waits))
    assert server.ranges() == ["0", "100000", "200000", "300000"]
    assert waits.seconds == []


def test_a_file_that_is_there_is_not_fetched(server: HostileServer, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"mine")
    assert fetched(server, tmp_path).was_there
    assert server.seen == []


def test_threads_that_fetch_one_file_leave_one_whole_file(server: HostileServer, tmp_path: Path) -> None:
    server.script = [does.stall(1000), does.cut(9000)]
    found: list[Fetched] = []
    said: list[str] = []
    patience = Patience(stall_seconds=0.5, poll_seconds=0.01, first_wait=0.01)
    destination = tmp_path / "model.gguf"
    threads = [
        threading.Thread(
            target=lambda: found.append(
                fetch(remote_of(server, sha256=SHA256), destination, Hearing(say=said.append), patience)
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert destination.read_bytes() == CONTENT
    assert sorted(one.was_there for one in found) == [False, True, True, True]
    assert said == ["another program is fetching model.gguf; waiting for it"] * 3
    assert server.ranges() == ["0", "1000", "10000"]


def _fetch_in_child(url: str, destination: Path) -> None:
    patience = Patience(stall_seconds=5, poll_seconds=0.01)
    fetch(RemoteFile(url, "model.gguf", sha256=SHA256), destination, patience=patience)


def test_a_program_that_was_killed_leaves_its_part_to_the_next(server: HostileServer, tmp_path: Path) -> None:
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
    kept = partial_path(destination).stat().st_size
    assert 0 < kept <= 120_000
    fetched(server, tmp_path, sha256=SHA256)
    assert destination.read_bytes() == CONTENT
    assert server.ranges() == ["0", str(kept)]


def test_progress_begins_with_what_is_there(server: HostileServer, tmp_path: Path) -> None:
    partial = partial_path(tmp_path / "model.gguf")
    partial.write_bytes(CONTENT[:1000])
    partial.with_name(partial.name + ".json").write_text(
        json.dumps({"tag": does.TAG, "total": len(CONTENT), "sha256": None})
    )
    seen: list[tuple[int, int | None]] = []
    hearing = Hearing(progress=lambda done, total: seen.append((done, total)))
    fetch(remote_of(server), tmp_path / "model.gguf", hearing, hasty())
    assert (seen[0], seen[-1]) == ((1000, 300_004), (300_004, 300_004))


def test_the_start_of_a_file_is_read_alone(server: HostileServer) -> None:
    server.script = [does.status(503), does.hang_up]
    assert read_start(remote_of(server), 1000, hasty()) == CONTENT[:1000]
    assert read_start(remote_of(server), 10**9, hasty()) == CONTENT
    server.otherwise = does.status(503)
    with pytest.raises(DownloadError, match="given up after 3 attempts"):
        read_start(remote_of(server), 1000, hasty())
