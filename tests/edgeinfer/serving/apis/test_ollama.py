"""Ollama's API, with the ollama client and plain requests."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.registry.registry import find_model
from edgeinfer.serving.models.keep_alive import keep_alive_of
from edgeinfer.serving.models.models import OneModel
from tests.conftest import needs
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import HELLO, TOOL_TEMPLATE, fake, post, served
from tests.random_models import CHAT_TEMPLATE

pytestmark = needs("ollama")
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'
GREEDY = {"temperature": 0}


@pytest.fixture
def client_of() -> Iterator[Any]:
    """Model -> a client of a server with it."""
    import ollama

    servers = []

    def of(model: Any) -> Any:
        server = served(model)
        servers.append(server)
        return ollama.Client(host=server.__enter__())

    yield of
    for server in servers:
        server.__exit__(None, None, None)


def test_a_chat_is_returned_complete_and_in_lines(client_of: Any) -> None:
    client = client_of(fake("The fox is here."))
    whole = client.chat("fake:latest", HELLO, options=GREEDY)
    assert (whole.message.content, whole.done, whole.done_reason) == ("The fox is here.", True, "stop")
    assert whole.eval_count == len("The fox is here.")
    assert whole.total_duration >= whole.prompt_eval_duration > 0
    chunks = list(client.chat("fake", HELLO, stream=True, options=GREEDY, keep_alive="5m"))
    assert "".join(chunk.message.content for chunk in chunks) == "The fox is here."
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 10


def test_a_prompt_is_completed(client_of: Any) -> None:
    client = client_of(fake("The fox is here."))
    limited = client.generate("fake", "Hi", system="Be brief.", options={**GREEDY, "num_predict": 3})
    assert (limited.response, limited.done_reason) == ("The", "length")
    raw = client.generate("fake", "Once", raw=True, options={**GREEDY, "num_predict": -1})
    assert raw.response == "The fox is here."
    loaded = client.generate("fake")
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_text_and_calls_are_apart(client_of: Any, streamed: bool) -> None:
    client = client_of(fake(f"<think>Which?</think>I look.\n{CALL}\n{CALL}", template=TOOL_TEMPLATE))
    replies = client.chat("fake", HELLO, tools=[LOOK], options=GREEDY, stream=streamed)
    messages = [reply.message for reply in (replies if streamed else [replies])]
    assert "".join(message.thinking or "" for message in messages) == "Which?"
    assert "".join(message.content or "" for message in messages) == "I look."
    calls = [call for message in messages for call in message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("look", {"at": "fox"})] * 2


def test_results_of_tools_and_thinking_are_sent_back(client_of: Any) -> None:
    client = client_of(fake("Red.", template=TOOL_TEMPLATE, context=2048))
    first = client_of(fake(f"<think>Hm</think>{CALL}", template=TOOL_TEMPLATE)).chat(
        "fake", HELLO, tools=[LOOK], options=GREEDY
    )
    history = [*HELLO, first.message, {"role": "tool", "tool_name": "look", "content": "red"}]
    assert client.chat("fake", history, tools=[LOOK], options=GREEDY).message.content == "Red."


def test_a_format_is_a_schema(client_of: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    client = client_of(model_on(FakeEngine(seeded_logits, 2048)))
    assert json.loads(client.chat("fake", HELLO, format=schema).message.content) == {"a": "b"}


def test_texts_are_embedded(client_of: Any) -> None:
    client = client_of(fake())
    reply = client.embed("fake", ["a b", "c"])
    assert [np.linalg.norm(vector) for vector in reply.embeddings] == pytest.approx([1, 1])
    assert reply.prompt_eval_count > 0
    assert list(client.embeddings("fake", "c").embedding) == pytest.approx(reply.embeddings[1])


def test_the_model_is_listed_and_shown(client_of: Any) -> None:
    with edgeinfer.load("tiny", device="cpu", draft=None) as model:
        client = client_of(OneModel(model, find_model("tiny")))
        (listed,) = client.list().models
        (running,) = client.ps().models
        shown = client.show("tiny")
    assert (listed.model, listed.details.format) == ("tiny", "gguf")
    assert listed.size > 1e6
    assert (running.model, running.context_length) == ("tiny", model.context)
    assert shown.modelinfo["general.architecture"] == listed.details.family == "arcee"
    assert "add_generation_prompt" in shown.template
    assert shown.capabilities == ["completion"]


@pytest.mark.anyio
@pytest.mark.parametrize(("think", "prompt"), [(True, "thinks"), (False, "calm"), (None, "usual")])
async def test_think_is_the_setting_of_the_template(think: bool | None, prompt: str) -> None:
    switch = "{{ 'usual' if thinking is not defined else 'thinks' if thinking else 'calm' }}" + CHAT_TEMPLATE
    model: Model = fake(template=switch)
    body = {"model": "fake", "messages": HELLO, "think": think, "stream": False}
    assert (await post(model, "/api/chat", body)).status_code == 200
    assert prompt in model.tokenizer.decode(model.engine.ids)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat", {"messages": HELLO, "option": {}}, "option: no such field; did you mean options?"),
        ("chat", {"messages": HELLO, "options": {"temp": 1}}, "options.temp: no such field"),
        ("chat", {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images: not supported"),
        ("chat", {"messages": HELLO, "keep_alive": "soon"}, "keep_alive: saw 'soon'"),
        ("chat", {"messages": HELLO, "format": "xml"}, "format: saw 'xml'"),
        (
            "chat",
            {"messages": HELLO, "tools": [LOOK]},
            "tools: the chat template of fake doesn't support them",
        ),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix: not supported here"),
        ("embed", {"input": 5}, "input: saw 5"),
    ],
)
async def test_errors_have_ollamas_format(path: str, fields: dict[str, Any], message: str) -> None:
    reply = await post(fake(), f"/api/{path}", {"model": "fake", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(message)


@pytest.mark.anyio
async def test_an_unknown_model_is_not_found() -> None:
    for path, fields in (("chat", {"messages": HELLO}), ("show", {}), ("embed", {"input": "a"})):
        reply = await post(fake(), f"/api/{path}", {"model": "other", **fields})
        assert (reply.status_code, reply.json()) == (
            404,
            {"error": "model 'other' isn't here; this server has 'fake'"},
        )


@pytest.mark.anyio
async def test_options_of_the_server_are_listed_as_without_effect() -> None:
    body = {"model": "fake", "messages": HELLO, "options": {"num_ctx": 9}, "stream": False}
    reply = (await post(fake(), "/api/chat", body)).json()
    assert reply["warnings"] == ["options.num_ctx: has no effect here"]


def test_durations_are_read() -> None:
    given = [None, 0, -1, "5m", "1h30m", "-1m", "90", "250ms"]
    assert [keep_alive_of(value) for value in given] == [None, 0, -1, 300, 5400, -60, 90, 0.25]
