"""Requests that are refused or queued, and clients that disconnect."""

import asyncio
import json
import threading
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

from edgeinfer import Model
from edgeinfer.errors import DeviceError
from edgeinfer.serving.app import serving_app
from tests.edgeinfer.fake_engine import FakeEngine, byte_ids, model_on
from tests.edgeinfer.serving.http_client import (
    CHAT,
    HELLO,
    JSON,
    chat,
    client,
    fake,
    post,
    scripted_after_any,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", CHAT, 405)])
async def test_an_unknown_route_gives_an_error_object(method: str, path: str, status: int) -> None:
    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.request(method, path)

    reply = await ask()
    assert reply.status_code == status
    assert reply.json()["error"]["message"].startswith(f"{method} {path}: ")


async def test_a_refusal_before_the_body_has_the_format_of_its_api() -> None:
    async with client(fake()) as http:
        for path, key in ((CHAT, "param"), ("/v1/messages", "type"), ("/api/chat", None)):
            for reply in (
                await http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}),
                await http.get(path),
            ):
                assert reply.status_code in (415, 405)
                error = reply.json()["error"]
                assert isinstance(error, str) if key is None else key in error
        lost = (await http.get("/v1/messages/x")).json()
    assert (lost["type"], lost["error"]["type"]) == ("error", "not_found_error")


async def test_only_the_loaded_model_is_listed_and_accepted() -> None:
    async def ask() -> list[Any]:
        async with client(fake()) as http:
            return [
                await http.get(path)
                for path in ("/v1/models", "/v1/models/fake", "/v1/models/other", "/health")
            ]

    listed, one, other, health = await ask()
    assert [each["id"] for each in listed.json()["data"]] == ["fake"]
    assert one.json()["context"] == 512
    assert other.status_code == 404
    assert health.json()["status"] == "ok"
    refused = await chat({"model": "gpt-4"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "this server has 'fake'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        ("chat/completions", {}, "messages: wanted list, saw NoneType"),
        ("chat/completions", {"messages": []}, "messages: saw none"),
        (
            "chat/completions",
            {"messages": HELLO, "tempature": 1},
            "tempature: no such field; did you mean temperature?",
        ),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo: log probabilities of a prompt"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0]: wanted an object with a role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "saw a part of type 'image_url', only text is supported",
        ),
        ("chat/completions", {"messages": HELLO, "temperature": -1}, "temperature"),
        ("chat/completions", {"messages": HELLO, "n": 99}, "n: saw 99, wanted 1 to 16"),
        (
            "chat/completions",
            {"messages": HELLO, "functions": [{}]},
            "functions: not supported here; use tools",
        ),
        (
            "chat/completions",
            {"messages": HELLO, "tool_choice": "required", "tools": []},
            "tool_choice: needs tools, saw none",
        ),
        (
            "chat/completions",
            {"messages": HELLO, "response_format": {"type": "xml"}},
            "wanted text, json_object, or json_schema",
        ),
        ("chat/completions", {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias: wanted token ids"),
        ("chat/completions", [1], "the body: saw list, wanted a JSON object"),
        ("completions", {"prompt": [["a"]]}, "prompt: saw"),
        ("completions", {"prompt": [99999]}, "saw token id 99999"),
        ("embeddings", {"input": []}, "input: wanted a text"),
        ("embeddings", {"input": "x", "dimensions": 4}, "dimensions: vectors have the model's hidden size"),
    ],
)
async def test_errors_have_the_openai_format(path: str, body: Any, output: str) -> None:
    reply = await post(fake(), f"/v1/{path}", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert output in reply.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_over_the_context_is_refused_before_streaming(streamed: bool) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    reply = await chat({"messages": long, "stream": streamed})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_an_invalid_json_body_is_refused() -> None:
    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.post(CHAT, content=b"{nothing", headers=JSON)

    assert "the body isn't JSON" in (await ask()).json()["error"]["message"]


async def test_a_configured_api_key_is_required() -> None:
    async def ask() -> list[int]:
        async with client(fake(), key="secret") as http:
            result = []
            for given in (None, "Bearer wrong", "Bearer secret"):
                headers = {"Authorization": given} if given else {}
                result.append((await http.get("/v1/models", headers=headers)).status_code)
            return result

    assert (await ask()) == [401, 401, 200]


async def test_another_host_name_is_refused() -> None:
    async def ask() -> int:
        async with client(fake()) as http:
            reply = await http.get("/v1/models", headers={"Host": "evil.example"})
            return int(reply.status_code)

    assert (await ask()) == 400


class Gate:
    """An engine that waits for an event before its second token."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def model(self) -> Model:
        completion = scripted_after_any("The fox.")

        def waiting(ids: list[int]) -> np.ndarray:
            if ids[-1] in byte_ids("T"):
                self.reached.set()
                assert self.open.wait(10)
            return completion(ids)

        return model_on(FakeEngine(waiting, 512))


async def test_requests_are_queued_and_too_many_are_rejected() -> None:
    gate = Gate()

    async def ask() -> list[int]:
        body = {"messages": HELLO, "temperature": 0}
        async with client(gate.model(), max_waiting=1) as http:
            first = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while not gate.reached.is_set():
                await asyncio.sleep(0.001)
            second = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while (await http.get("/health")).json()["waiting"] != 1:
                await asyncio.sleep(0.001)
            third = await http.post("/v1/chat/completions", json=body)
            gate.open.set()
            return [(await first).status_code, (await second).status_code, third.status_code]

    assert (await ask()) == [200, 200, 429]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_disconnected_client_cancels_its_response(streamed: bool) -> None:
    gate = Gate()
    model = gate.model()
    app = serving_app(model)
    body = json.dumps({"messages": HELLO, "temperature": 0, "stream": streamed}).encode()

    async def ask() -> None:
        left = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_: MutableMapping[str, Any]) -> None:
            pass

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "method": "POST", "path": "/v1/chat/completions",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "query_string": b"", "http_version": "1.1",
        }  # fmt: skip
        request = asyncio.create_task(app(scope, receive, send))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        left.set()
        gate.open.set()
        await asyncio.wait_for(request, 10)

    (await ask())
    assert len(model.engine.ids) < len("The fox.") + 60
    assert (await chat({}, model)).json()["choices"][0]["message"]["content"] == "The fox."


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (CHAT, {}, 'data: {"error": {"message": "the GPU failed"'),
        ("/v1/responses", {"input": "Hi", "messages": None}, "event: response.failed"),
        (
            "/v1/messages",
            {"max_tokens": 99},
            'event: error\ndata: {"type": "error", "error": {"type": "api_error"',
        ),
        ("/api/chat", {"model": "fake"}, '{"error": "the GPU failed"}'),
    ],
)
async def test_a_failure_in_a_stream_is_its_last_event(path: str, body: Any, last: str) -> None:
    completion = scripted_after_any("The fox.")

    def failing(ids: list[int]) -> np.ndarray:
        if ids[-1] in byte_ids("e"):
            raise DeviceError("the GPU failed")
        return completion(ids)

    model = model_on(FakeEngine(failing, 512))
    reply = await post(model, path, {"messages": HELLO, "stream": True, **body})
    assert reply.status_code == 200
    assert reply.text.rstrip().split("\n\n" if path != "/api/chat" else "\n")[-1].startswith(last)
    whole = await post(model, path, {"messages": HELLO, "stream": False, **body})
    assert whole.status_code == 500
