"""Files of requests in OpenAI's batch format: rows, errors, and resuming."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from edgeinfer.errors import SettingError
from edgeinfer.serving.app import ServerOptions, serving_app
from edgeinfer.serving.batch.batch_run import BatchCounts, run_batch
from edgeinfer.serving.batch.lines import read_lines
from edgeinfer.serving.batch.local_requests import LocalRequests
from edgeinfer.serving.batch.output_file import BatchOutput
from tests.edgeinfer.serving.http_client import CHAT, HELLO, fake

pytestmark = pytest.mark.anyio


def request(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **fields}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


async def run(
    source: Path, target: Path, progress: Any = lambda done, total: None, parallel: int = 4
) -> BatchCounts:
    app = serving_app(fake("The fox."), ServerOptions(max_waiting=4))
    with BatchOutput(target) as output:
        return await run_batch(LocalRequests(app), read_lines(source), output, parallel, progress)


def rows(path: Path) -> dict[str, Any]:
    """custom_id, or the id of a row without one -> the row."""
    result = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        key = row["custom_id"] or row["id"]
        result[key] = row
    return result


async def test_each_line_becomes_a_row(tmp_path: Path) -> None:
    source = written(
        tmp_path,
        request("a"),
        "",
        request("c", body={"messages": []}),
        request("d", url="/v1/messages", body={"messages": HELLO, "max_tokens": 3}),
        request("b", url="/v1/embeddings", body={"input": "x"}),
    )
    seen: list[tuple[int, int]] = []
    counts = await run(source, tmp_path / "out", lambda done, total: seen.append((done, total)), 1)
    assert (counts.completed, counts.failed) == (3, 1)
    assert seen == [(done, 4) for done in range(5)]
    found = rows(tmp_path / "out")
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "The fox."
    assert found["a"]["error"] is None
    assert len(found["b"]["response"]["body"]["data"]) == 1
    assert found["c"]["response"]["status_code"] == 400
    assert found["c"]["response"]["body"]["error"]["message"].startswith("messages: saw none")
    assert found["d"]["response"]["body"]["content"][0]["text"] == "The"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON, wanted an object"),
        ("[1]", "line 1: saw [1], wanted an object"),
        ({"url": CHAT}, "line 1: custom_id: saw None, wanted a text"),
        (request("a", url="/v1/files"), "line 1: url: saw '/v1/files', wanted one of /v1/chat"),
        (request("a", method="GET"), "line 1: method: saw 'GET', wanted POST"),
        (request("a", body=[]), "line 1: body: saw [], wanted an object"),
        (request("a", body={"stream": True}), "line 1: body.stream: a batch can't stream"),
        (request("a", priority=1), "line 1: 'priority': no such field"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
async def test_a_bad_line_becomes_an_error(tmp_path: Path, line: Any, message: str) -> None:
    counts = await run(written(tmp_path, line, request("z")), tmp_path / "out")
    assert (counts.completed, counts.failed) == (1, 1)
    (error,) = [row["error"] for row in rows(tmp_path / "out").values() if row["error"]]
    assert error["code"] == "invalid_line"
    assert error["message"].startswith(message)


async def test_a_repeated_id_becomes_an_error(tmp_path: Path) -> None:
    await run(written(tmp_path, request("a"), request("a")), tmp_path / "out")
    texts = (tmp_path / "out").read_text().splitlines()
    assert sorted(json.loads(text)["error"] is None for text in texts) == [False, True]


@pytest.mark.parametrize("end", ["", '{"id": "batch_req_3_', '{"id": "x", "custom_id": null}'])
async def test_a_later_run_continues_after_a_partial_row(tmp_path: Path, end: str) -> None:
    source, target = written(tmp_path, *(request(str(number)) for number in range(6))), tmp_path / "out"
    await run(source, target)
    complete = target.read_text().splitlines()
    target.write_text("\n".join(complete[:2]) + "\n" + end)
    counts = await run(source, target)
    assert counts.completed == 4
    assert sorted(json.loads(line)["custom_id"] for line in target.read_text().splitlines()) == list("012345")
    assert (await run(source, target)).completed == 0
    assert not list(tmp_path.glob(".*"))


async def test_an_output_of_other_lines_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    await run(written(tmp_path, request("a")), target)
    with pytest.raises(SettingError, match="1 of its rows, as batch_req_1_"):
        await run(written(tmp_path, request("b")), target)
    target.write_text("some text\n")
    with pytest.raises(SettingError, match="line 1 is no row of a batch; name another file"):
        await run(written(tmp_path, request("b")), target)
    assert target.read_text() == "some text\n"
    with pytest.raises(SettingError, match="saw no lines"):
        read_lines(written(tmp_path, "", " "))


async def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    with BatchOutput(tmp_path / "out"), pytest.raises(SettingError, match="another batch writes it"):
        BatchOutput(tmp_path / "out").__enter__()


async def test_lines_of_one_model_follow_each_other(tmp_path: Path) -> None:
    lines = [request(str(number), body={"model": "ab"[number % 2]}) for number in range(4)]
    assert [line.custom_id for line in read_lines(written(tmp_path, *lines))] == ["0", "2", "1", "3"]


async def test_a_cancelled_batch_keeps_its_rows(tmp_path: Path) -> None:
    source, target = written(tmp_path, *(request(str(number)) for number in range(8))), tmp_path / "out"
    task: asyncio.Task[BatchCounts] | None = None

    def stop_at_two(done: int, total: int) -> None:
        if done == 2:
            assert task is not None
            task.cancel()

    task = asyncio.create_task(run(source, target, stop_at_two))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 2 <= len(rows(target)) < 8
    await run(source, target)
    assert len(target.read_text().splitlines()) == len(rows(target)) == 8
