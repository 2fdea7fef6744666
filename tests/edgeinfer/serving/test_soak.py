"""Thousands of mixed requests with disconnects, bad bodies and model switches: no leak, no stuck slot."""

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

import httpx

import edgeinfer
from edgeinfer.serving.models.installed import InstalledModels
from edgeinfer.serving.models.pool import ModelPool
from tests.edgeinfer.serving.http_client import HELLO, served

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

CLIENTS, REQUESTS_PER_ROUND, ROUNDS = 8, 1200, 5
BUDGET = 40 << 20
"""Holds one of the two models."""
MAX_GROWTH = 12 << 20
DRAFT = Path(edgeinfer.__file__).parent / "builtin" / "edgeinfer-tiny-draft-5m-Q8_0.gguf"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}


def shot(source: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    model = DRAFT.stem if source.random() < 0.1 else "tiny"
    count, streamed = source.randrange(1, 40), source.random() < 0.6
    common: dict[str, Any] = {"model": model, "stream": streamed}
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    return source.choice(
        (
            ("/v1/chat/completions", {"messages": HELLO, "max_tokens": count, **common}),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": count, **common}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": count, **common}),
            ("/api/chat", {"messages": HELLO, "options": {"num_predict": count}, **common}),
            ("/v1/embeddings", {"model": model, "input": ["a b"]}),
            ("/v1/chat/completions", {"messages": HELLO, "bad": 1, **common}),
            ("/v1/chat/completions", {"messages": HELLO, "response_format": form, **common}),
        )
    )


async def one_client(http: httpx.AsyncClient, seed: int, requests: int, statuses: Counter[int]) -> None:
    source = random.Random(seed)
    for _ in range(requests):
        path, body = shot(source)
        way = source.random()
        if way < 0.15:  # leaves after the first bytes
            async with http.stream("POST", path, json=body) as reply:
                statuses[reply.status_code] += 1
                await anext(reply.aiter_raw(), None)
        elif way < 0.2:  # leaves before the response
            task = asyncio.create_task(http.post(path, json=body))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            statuses[(await http.post(path, json=body)).status_code] += 1


@pytest.fixture
def frozen() -> Iterator[None]:
    """A collection after each model doesn't look at the objects of other tests, which takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
async def test_mixed_requests_leave_no_memory_and_no_slot(scaled: Callable[[int], int]) -> None:
    requests = scaled(REQUESTS_PER_ROUND) // CLIENTS
    options = {"device": "cpu", "draft": None, "ram": BUDGET}
    loads: list[str] = []
    pool: Any = ModelPool(InstalledModels(["tiny", str(DRAFT)], options, loads.append), default="tiny")
    statuses: Counter[int] = Counter()
    sizes = []
    with served(pool) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for round_ in range(ROUNDS):
                clients = [
                    one_client(http, round_ * CLIENTS + each, requests, statuses) for each in range(CLIENTS)
                ]
                await asyncio.gather(*clients)
                while (await http.get("/health")).json()["waiting"]:
                    await asyncio.sleep(0)
                sizes.append(psutil.Process().memory_info().rss)
    assert statuses.keys() == {200, 400}
    assert len(loads) > 20
    # What the allocator holds varies from round to round.
    assert min(sizes[-2:]) - min(sizes[:2]) < MAX_GROWTH, [size >> 20 for size in sizes]
