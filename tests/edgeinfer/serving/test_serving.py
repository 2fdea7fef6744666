"""OpenAI's interface over HTTP, as the openai client and plain requests meet it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx

import edgeinfer
from edgeinfer import Model
from edgeinfer.serving.app import ServingWishes, serving_app
from tests.edgeinfer.fake_engine import FakeEngine, byte_ids, drawn, model_on, saying

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]
Asked = dict[str, Any]


def saying_after_any(text: str) -> Callable[[list[int]], np.ndarray]:
    """This text behind a prompt, however long."""
    begun: list[int] = []

    def answer(ids: list[int]) -> np.ndarray:
        if not begun or len(ids) < begun[0]:
            begun[:] = [len(ids)]
        return saying(text, begun[0])(ids)

    return answer


def fake(text: str = "The fox is here.", context: int = 512) -> Model:
    return model_on(FakeEngine(saying_after_any(text), context))


@asynccontextmanager
async def client(model: Model, **wishes: Any) -> AsyncIterator[Any]:
    app = serving_app(model, ServingWishes(**wishes))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as found:
        yield found


def post(model: Model, path: str, body: Any, **wishes: Any) -> Any:
    async def ask() -> Any:
        async with client(model, **wishes) as http:
            return await http.post(path, json=body)

    return asyncio.run(ask())


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


def chat(body: Asked, model: Model | None = None, **wishes: Any) -> Any:
    return post(
        model or fake(), "/v1/chat/completions", {"messages": HELLO, "temperature": 0, **body}, **wishes
    )


def test_a_chat_is_answered_whole() -> None:
    reply = chat({"model": "fake"})
    found = reply.json()
    assert reply.status_code == 200
    assert (found["object"], found["model"]) == ("chat.completion", "fake")
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "The fox is here."}
    assert choice["finish_reason"] == "stop"
    used = found["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert used["completion_tokens"] == len("The fox is here.")


def test_a_chat_streams_the_same_piece_by_piece() -> None:
    found = events(chat({"stream": True, "stream_options": {"include_usage": True}}).text)
    assert {each["object"] for each in found} == {"chat.completion.chunk"}
    assert len({each["id"] for each in found}) == 1
    *pieces, last, used = found
    assert "".join(each["choices"][0]["delta"]["content"] for each in pieces) == "The fox is here."
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert used["choices"] == []
    assert used["usage"]["completion_tokens"] == len("The fox is here.")


def test_several_answers_and_limits() -> None:
    found = chat({"n": 2, "max_tokens": 3}).json()
    assert [(each["index"], each["message"]["content"]) for each in found["choices"]] == [
        (0, "The"),
        (1, "The"),
    ]
    assert {each["finish_reason"] for each in found["choices"]} == {"length"}
    streamed = events(chat({"n": 2, "max_completion_tokens": 3, "stream": True}).text)
    assert {each["choices"][0]["index"] for each in streamed} == {0, 1}


def test_an_answer_keeps_to_a_schema() -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    model = model_on(FakeEngine(drawn, 512))
    found = chat({"response_format": form, "max_tokens": 300}, model).json()
    assert json.loads(found["choices"][0]["message"]["content"]) == {"a": "b"}
    refused = chat({"response_format": {**form, "json_schema": {"schema": {"enum": []}}}}, model)
    assert refused.status_code == 400
    assert "Unsatisfiable schema" in refused.json()["error"]["message"]


def test_calls_of_tools_are_found_whole_and_streamed() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    text = '<tool_call>{"name": "look", "arguments": {"at": "ä"}}</tool_call>'
    found = chat({"tools": tools}, fake(text)).json()["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    call = found["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "ä"}
    pieces = events(chat({"tools": tools, "stream": True}, fake(text)).text)
    deltas = [each["choices"][0]["delta"] for each in pieces]
    assert [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta] == [
        call["function"]
    ]
    said = chat({"tools": tools, "stream": True}, fake("No need."))
    assert events(said.text)[0]["choices"][0]["delta"]["content"] == "No need."
    assert (
        chat({"tools": tools, "tool_choice": "none"}, fake(text)).json()["choices"][0]["message"]["content"]
        == text
    )


def test_log_probabilities_come_with_their_bytes() -> None:
    found = chat({"logprobs": True, "top_logprobs": 2, "max_tokens": 2}).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [each["token"] for each in found] == ["T", "h"]
    assert found[0]["bytes"] == list(b"T")
    assert found[0]["logprob"] == pytest.approx(0, abs=1e-3)
    assert len(found[0]["top_logprobs"]) == 2


def test_a_text_is_continued() -> None:
    body = {"prompt": ["Once", [1, 5]], "max_tokens": 3, "temperature": 0}
    found = post(fake(), "/v1/completions", body | {"logprobs": 1}).json()
    assert found["object"] == "text_completion"
    assert found["choices"][0]["text"] == "The"
    assert found["choices"][0]["logprobs"]["tokens"] == ["T", "h", "e"]
    assert found["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]
    streamed = post(fake(), "/v1/completions", {"prompt": "Once", "stream": True, "temperature": 0})
    assert "".join(each["choices"][0]["text"] for each in events(streamed.text)) == "The fox is here."


def test_an_echoed_prompt_stands_before_the_answer_whole_and_streamed() -> None:
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "echo": True}
    found = post(fake(), "/v1/completions", body).json()
    assert found["choices"][0]["text"] == "OnceThe"
    streamed = events(post(fake(), "/v1/completions", body | {"stream": True}).text)
    assert [each["choices"][0]["text"] for each in streamed][:2] == ["Once", "T"]
    assert "".join(each["choices"][0]["text"] for each in streamed) == "OnceThe"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("GET", CHAT, 405)])
def test_what_is_not_there_is_an_error_object_too(method: str, path: str, status: int) -> None:
    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.request(method, path)

    reply = asyncio.run(ask())
    assert reply.status_code == status
    assert reply.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_every_sampler_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    model, generate = fake(), Model.generate_async

    def heard(self: Model, prompt: Any, **settings: Any) -> Any:
        asked.append(settings)
        return generate(self, prompt, **settings)

    monkeypatch.setattr(Model, "generate_async", heard)
    given = {
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ["x"],
    }
    assert chat(given, model).status_code == 200
    assert asked[0].items() >= {**given, "dry_sequence_breakers": ("x",)}.items()


def test_texts_become_vectors() -> None:
    reply = post(fake(), "/v1/embeddings", {"input": ["a b", "c"]}).json()
    assert [each["index"] for each in reply["data"]] == [0, 1]
    assert np.linalg.norm(reply["data"][0]["embedding"]) == pytest.approx(1)
    packed = post(fake(), "/v1/embeddings", {"input": "c", "encoding_format": "base64"}).json()
    assert isinstance(packed["data"][0]["embedding"], str)


def test_the_model_is_listed_and_no_other_is_pretended() -> None:
    async def ask() -> list[Any]:
        async with client(fake()) as http:
            return [
                await http.get(path)
                for path in ("/v1/models", "/v1/models/fake", "/v1/models/other", "/health")
            ]

    listed, one, other, health = asyncio.run(ask())
    assert [each["id"] for each in listed.json()["data"]] == ["fake"]
    assert one.json()["context"] == 512
    assert other.status_code == 404
    assert health.json()["status"] == "ok"
    refused = chat({"model": "gpt-4"})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "this server has 'fake'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {}, "messages: wanted list, saw NoneType"),
        ("chat/completions", {"messages": []}, "messages: saw none"),
        (
            "chat/completions",
            {"messages": HELLO, "tempature": 1},
            "tempature: no such field; did you mean temperature?",
        ),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo: a prompt's log probabilities"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0]: wanted an object with a role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "saw a part of type 'image_url', only text is read here",
        ),
        ("chat/completions", {"messages": HELLO, "temperature": -1}, "temperature"),
        ("chat/completions", {"messages": HELLO, "n": 99}, "n: saw 99, wanted 1 to 16"),
        ("chat/completions", {"messages": HELLO, "functions": [{}]}, "functions: not supported here"),
        (
            "chat/completions",
            {"messages": HELLO, "tool_choice": "required", "tools": []},
            "tool_choice: auto and none",
        ),
        (
            "chat/completions",
            {"messages": HELLO, "response_format": {"type": "xml"}},
            "response_format: wanted text",
        ),
        ("chat/completions", {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias: wanted token ids"),
        ("chat/completions", [1], "the body: saw list, wanted a JSON object"),
        ("completions", {"prompt": [["a"]]}, "prompt: saw"),
        ("completions", {"prompt": [99999]}, "saw token id 99999"),
        ("embeddings", {"input": []}, "input: wanted a text"),
        ("embeddings", {"input": "x", "dimensions": 4}, "dimensions: vectors have the model's width"),
    ],
)
def test_a_mistake_is_told_in_openais_way(path: str, body: Any, told: str) -> None:
    reply = post(fake(), f"/v1/{path}", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_what_does_not_fit_the_context_is_refused_before_a_word(streamed: bool) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    reply = chat({"messages": long, "stream": streamed})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_body_that_is_no_json_is_refused() -> None:
    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.post("/v1/chat/completions", content=b"{nothing")

    assert "the body isn't JSON" in asyncio.run(ask()).json()["error"]["message"]


def test_with_a_key_only_those_who_know_it_are_answered() -> None:
    async def ask() -> list[int]:
        async with client(fake(), key="secret") as http:
            found = []
            for given in (None, "Bearer wrong", "Bearer secret"):
                headers = {"Authorization": given} if given else {}
                found.append((await http.get("/v1/models", headers=headers)).status_code)
            return found

    assert asyncio.run(ask()) == [401, 401, 200]


def test_another_name_for_this_machine_is_refused() -> None:
    async def ask() -> int:
        async with client(fake()) as http:
            reply = await http.get("/v1/models", headers={"Host": "evil.example"})
            return int(reply.status_code)

    assert asyncio.run(ask()) == 400


class Gate:
    """An engine that waits for a sign before its second token."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def model(self) -> Model:
        answer = saying_after_any("The fox.")

        def waiting(ids: list[int]) -> np.ndarray:
            if ids[-1] in byte_ids("T"):
                self.reached.set()
                assert self.open.wait(10)
            return answer(ids)

        return model_on(FakeEngine(waiting, 512))


def test_requests_wait_for_their_turn_and_too_many_are_sent_away() -> None:
    gate = Gate()

    async def ask() -> list[int]:
        body = {"messages": HELLO, "temperature": 0}
        async with client(gate.model(), most_waiting=1) as http:
            first = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while not gate.reached.is_set():
                await asyncio.sleep(0.001)
            second = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while (await http.get("/health")).json()["waiting"] != 1:
                await asyncio.sleep(0.001)
            third = await http.post("/v1/chat/completions", json=body)
            gate.open.set()
            return [(await first).status_code, (await second).status_code, third.status_code]

    assert asyncio.run(ask()) == [200, 200, 429]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_ends_its_answer(streamed: bool) -> None:
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
            "headers": [(b"host", b"localhost")], "query_string": b"", "http_version": "1.1",
        }  # fmt: skip
        request = asyncio.create_task(app(scope, receive, send))
        while not gate.reached.is_set():
            await asyncio.sleep(0.001)
        left.set()
        gate.open.set()
        await asyncio.wait_for(request, 10)

    asyncio.run(ask())
    assert len(model.engine.ids) < len("The fox.") + 60
    assert chat({}, model).json()["choices"][0]["message"]["content"] == "The fox."


@contextmanager
def served(model: Model) -> Iterator[str]:
    """A real server on a free port of this machine."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(serving_app(model), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_openai_client_meets_what_it_expects() -> None:
    openai = pytest.importorskip("openai")
    with edgeinfer.load("tiny", device="cpu", draft=None) as model, served(model) as url:
        asker = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        assert [each.id for each in asker.models.list()] == ["tiny"]
        settings: Asked = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        whole = asker.chat.completions.create(messages=HELLO, **settings)
        pieces = list(asker.chat.completions.create(messages=HELLO, stream=True, **settings))
        said = "".join(each.choices[0].delta.content or "" for each in pieces)
        assert said == whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 12
        text = asker.completions.create(prompt="Once upon a time", **settings)
        assert text.choices[0].text == model.generate("Once upon a time", max_tokens=12, temperature=0.0).text
        vectors = asker.embeddings.create(model="tiny", input=["A fox.", "A dog."])
        np.testing.assert_allclose(vectors.data[0].embedding, model.embed("A fox."), rtol=1e-6)
        assert vectors.usage.prompt_tokens == model.text_vectors(["A fox.", "A dog."]).tokens
        with pytest.raises(openai.BadRequestError, match="the prompt has"):
            asker.chat.completions.create(messages=[{"role": "user", "content": "fox " * 5000}], **settings)
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            asker.chat.completions.create(messages=HELLO, model="other")
