"""Requests answered together: each gets what it gets alone, and nothing is left of those that ended early."""

import asyncio
import json
import random
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.serving.app import ServerOptions, serving_app
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.serving.http_client import CHAT, Fields, client, events

pytestmark = pytest.mark.anyio

PARALLEL, CONTEXT = 3, 160
GRAMMAR = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module")
def model(zoo_file: ZooFile) -> Iterator[Model]:
    with edgeinfer.load(
        zoo_file("llama"), device="cpu", threads=1, draft=None, context=CONTEXT, parallel=PARALLEL
    ) as loaded:
        yield loaded


def body(index: int, **fields: Any) -> Fields:
    text = f"request {index} " + "and more " * (index % 5)
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4 + index % 9,
        "seed": index,
        **fields,
    }


async def test_responses_together_are_those_of_each_alone(model: Model) -> None:
    async with client(model) as http:
        alone = [(await http.post(CHAT, json=body(index))).json() for index in range(7)]
        together = await asyncio.gather(*(http.post(CHAT, json=body(index)) for index in range(7)))
    assert [each.json()["choices"] for each in together] == [each["choices"] for each in alone]


def shown(chunk: Any) -> str:
    """The text of a streamed choice of either API."""
    return str(chunk.get("text") or chunk.get("delta", {}).get("content") or "")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_completions_of_one_streamed_request_come_interleaved(model: Model, path: str) -> None:
    fields = {"n": 3, "max_tokens": 96, "seed": 9, "temperature": 1.0}
    asked = {**body(0, **fields), "prompt": "one and more"}
    asked.pop("messages" if path != CHAT else "prompt")
    async with client(model) as http:
        reply = (await http.post(path, json=asked)).json()
        stream = await http.post(
            path, json={**asked, "stream": True, "stream_options": {"include_usage": True}}
        )
    *chunks, used = events(stream.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = ["".join(shown(each) for each in choices if each["index"] == index) for index in range(3)]
    assert texts == [each.get("text") or each["message"]["content"] for each in reply["choices"]]
    assert used["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"] > 3 * 12
    indices = [each["index"] for each in choices]
    lasts = [len(indices) - 1 - indices[::-1].index(index) for index in range(3)]
    assert max(indices.index(index) for index in range(3)) < min(lasts)
    assert sum(a != b for a, b in pairwise(indices)) >= 12


async def test_the_server_shows_the_number_of_parallel_requests(model: Model) -> None:
    async with client(model) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert model.plan is not None
        assert (card["parallel"], card["cache_bytes"]) == (PARALLEL, model.plan.cache_bytes)
        long = [asyncio.create_task(http.post(CHAT, json=body(1, max_tokens=40))) for _ in range(5)]
        seen = set()
        while not all(task.done() for task in long):
            health = (await http.get("/health")).json()
            seen.add(health["running"])
            assert health["running"] + health["waiting"] <= 5
            await asyncio.sleep(0.001)  # a loop without pauses leaves the model's thread little of the GIL
        assert max(seen) == PARALLEL
        assert (await http.get("/health")).json() == {
            "status": "ok",
            "waiting": 0,
            "running": 0,
            "loaded": ["llama"],
        }


@dataclass
class Exchange:
    """One request of a client that may leave after some parts of the response; `status` 0: it got none."""

    path: str
    raw: bytes
    leaves_after: int | None = None
    status: int = 0
    parts: list[bytes] = field(default_factory=list)

    async def run(self, app: Any) -> "Exchange":
        left, sent = asyncio.Event(), [{"type": "http.request", "body": self.raw, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if sent:
                return sent.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            self.status = message.get("status", self.status)
            self.parts.append(message.get("body", b""))
            if self.leaves_after is not None and len(self.parts) > self.leaves_after:
                left.set()

        if self.leaves_after == 0:
            left.set()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": self.path,
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "query_string": b"", "http_version": "1.1",
        }  # fmt: skip
        await app(scope, receive, send)
        return self


def exchange(index: int, rng: random.Random) -> Exchange:
    """One of many kinds of requests, some of which are bad, or whose client leaves."""
    kinds: list[tuple[str, Any]] = [
        (CHAT, body(index)),
        (CHAT, body(index, stream=True)),
        (CHAT, body(index, n=2, logprobs=True)),
        (CHAT, body(index, stream=True, max_tokens=60)),
        ("/v1/completions", {"prompt": [f"a {index}", "b"], "max_tokens": 5, "grammar": GRAMMAR}),
        ("/v1/completions", {"prompt": "long " * 500}),
        ("/v1/embeddings", {"input": ["one", f"two {index}"]}),
        (CHAT, body(index, temperature=-1)),
        (CHAT, body(index, model="another")),
        (CHAT, {"messages": "no list"}),
    ]
    path, fields = kinds[index % len(kinds)]
    raw = json.dumps(fields).encode()
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw))]
    return Exchange(path, raw, rng.randrange(8) if rng.random() < 0.3 else None)


@pytest.mark.slow
async def test_nothing_is_left_of_hundreds_of_mixed_requests(model: Model) -> None:
    rng = random.Random(5)
    app = serving_app(model, ServerOptions(max_waiting=1000))
    expected = Exchange(CHAT, json.dumps(body(3)).encode())
    await expected.run(app)
    counts: dict[int, int] = {}
    for first in range(0, 600, 30):
        exchanges = [exchange(first + index, rng) for index in range(30)]
        for done in await asyncio.gather(*(each.run(app) for each in exchanges)):
            counts[done.status] = counts.get(done.status, 0) + 1
    assert set(counts) <= {0, 200, 400, 404, 499}
    assert counts[200] > 150
    scheduler = model.completer.scheduler
    scheduler.step()  # drops those that were cancelled last
    assert scheduler.live == []
    assert isinstance(scheduler.requests, PagedRequests)
    cache = scheduler.requests.cache
    cache.store()
    assert cache.free + cache.idle == cache.total
    again = Exchange(CHAT, json.dumps(body(3)).encode())
    await again.run(app)
    shown, shown_again = (json.loads(b"".join(each.parts))["choices"] for each in (expected, again))
    assert shown == shown_again
    async with client(model) as http:
        assert (await http.get("/health")).json() == {
            "status": "ok",
            "waiting": 0,
            "running": 0,
            "loaded": ["llama"],
        }
