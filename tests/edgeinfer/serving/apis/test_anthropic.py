"""Anthropic's Messages API, with the anthropic client and plain requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgeinfer import Model
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import HELLO, TOOL_TEMPLATE, fake, post, served
from tests.random_models import CHAT_TEMPLATE

LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Looks at an animal.",
    "input_schema": {"type": "object", "properties": {"at": {"enum": ["fox"]}}, "required": ["at"]},
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'
SETTINGS: dict[str, Any] = {"model": "fake", "max_tokens": 300}
VERBATIM = "{% for m in messages %}{{ m }}{% endfor %}"


@pytest.fixture
def client_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Model -> a client of a server with it."""
    anthropic = pytest.importorskip("anthropic")
    servers = []

    def of(model: Model, key: str | None = None) -> Any:
        server = served(model, key=key)
        servers.append(server)
        return anthropic.Anthropic(base_url=server.__enter__(), api_key=key or "none", max_retries=0)

    yield of
    for server in servers:
        server.__exit__(None, None, None)


def test_a_message_is_returned_complete_and_streamed(client_of: Any) -> None:
    client = client_of(fake("The fox is here."))
    whole = client.messages.create(messages=HELLO, system="Be brief.", **SETTINGS)
    assert [block.text for block in whole.content] == ["The fox is here."]
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", "fake", "end_turn")
    assert whole.usage.output_tokens == len("The fox is here.")
    with client.messages.stream(
        messages=HELLO, system=[{"type": "text", "text": "Be brief."}], **SETTINGS
    ) as stream:
        assert "".join(stream.text_stream) == "The fox is here."
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    used = final.usage
    assert used.input_tokens + used.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )
    limited = client.messages.create(messages=HELLO, **{**SETTINGS, "max_tokens": 3})
    assert (limited.content[0].text, limited.stop_reason) == ("The", "max_tokens")


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_text_and_calls_are_blocks_in_order(client_of: Any, streamed: bool) -> None:
    text = f"<think>Which animal?</think>I look.\n{CALL}\n{CALL}"
    client = client_of(fake(text, template=TOOL_TEMPLATE))
    body = {"messages": HELLO, "tools": [LOOK], **SETTINGS}
    if streamed:
        with client.messages.stream(**body) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**body)
    thinking, content, *calls = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Which animal?")
    assert (content.type, content.text) == ("text", "I look.")
    assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "look", {"at": "fox"})] * 2
    assert calls[0].id != calls[1].id
    assert message.stop_reason == "tool_use"
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    assert [block.type for block in client.messages.create(**body).content].count("tool_use") == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_call_is_forced(client_of: Any, choice: dict[str, str]) -> None:
    pytest.importorskip("llguidance")
    client = client_of(model_on(FakeEngine(seeded_logits, 2048), TOOL_TEMPLATE))
    message = client.messages.create(messages=HELLO, tools=[LOOK], tool_choice=choice, **SETTINGS)
    assert [(block.name, block.input) for block in message.content] == [("look", {"at": "fox"})]


def test_a_stop_sequence_is_returned(client_of: Any) -> None:
    message = client_of(fake("The fox is here.")).messages.create(
        messages=HELLO, stop_sequences=["dog", " is"], **SETTINGS
    )
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "The fox",
        "stop_sequence",
        " is",
    )


def test_tokens_are_counted_without_a_completion(client_of: Any) -> None:
    client = client_of(fake("The fox.", template=TOOL_TEMPLATE))
    counted = client.messages.count_tokens(messages=HELLO, model="fake", tools=[LOOK]).input_tokens
    used = client.messages.create(messages=HELLO, tools=[LOOK], **SETTINGS).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens
    assert counted > client.messages.count_tokens(messages=HELLO, model="fake").input_tokens


def test_the_key_is_taken_from_both_headers(client_of: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = client_of(fake(), key="secret")
    assert client.messages.create(messages=HELLO, **SETTINGS).content
    assert client.with_options(api_key=None, auth_token="secret").models.list().data[0].id == "fake"
    with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
        client.with_options(api_key="other").messages.create(messages=HELLO, **SETTINGS)
    with pytest.raises(anthropic.NotFoundError, match="this server has 'fake'"):
        client.messages.create(messages=HELLO, **{**SETTINGS, "model": "other"})


@pytest.mark.anyio
async def test_blocks_become_messages_of_the_template() -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "x"},
                {"type": "text", "text": "B"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "fox"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "red"}]},
                {"type": "text", "text": "C"},
            ],
        },
    ]
    model = fake(template=VERBATIM, context=4096)
    reply = await post(model, "/v1/messages", {"messages": history, **SETTINGS, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    text = model.tokenizer.decode(model.engine.ids)
    parts = ["'role': 'user', 'content': 'A'", "'reasoning_content': 'Hm'", "'content': 'B'"]
    parts += ["'tool_call_id': 't1', 'name': 'look', 'content': 'red'", "'role': 'user', 'content': 'C'"]
    assert [part for part in parts if part not in text] == []


def block(content: Any) -> dict[str, Any]:
    """Messages with one content block."""
    return {"messages": [{"role": "user", "content": [content]}]}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: saw none"),
        ({"messages": []}, "messages: saw none"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The"}]}, "messages: the last one is"),
        (block({"type": "image"}), "messages[0]: saw a block of type 'image'"),
        (block({"type": "tool_result", "tool_use_id": "z"}), "messages[0]: saw a tool_result for 'z'"),
        ({"stop": ["a"]}, "stop: no such field; did you mean stop_sequences?"),
        ({"max_tokns": 1}, "max_tokns: no such field; did you mean max_tokens?"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: saw a tool of type"),
        ({"tools": [LOOK]}, "tools: the chat template of fake doesn't support them"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"thinking": {"type": "on"}}, "thinking.type: saw 'on'"),
    ],
)
async def test_errors_have_anthropics_format(fields: dict[str, Any], message: str) -> None:
    reply = await post(fake(), "/v1/messages", {"messages": HELLO, **SETTINGS, **fields})
    assert reply.status_code == 400
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(message)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("thinking", "prompt"), [("enabled", "thinks"), ("disabled", "calm"), ("adaptive", "usual")]
)
async def test_thinking_is_the_setting_of_the_template(thinking: str, prompt: str) -> None:
    switch = (
        "{{ 'usual' if enable_thinking is not defined else 'thinks' if enable_thinking else 'calm' }}"
        + CHAT_TEMPLATE
    )
    model = fake(template=switch)
    body = {"messages": HELLO, **SETTINGS, "thinking": {"type": thinking}}
    assert (await post(model, "/v1/messages", body)).status_code == 200
    assert prompt in model.tokenizer.decode(model.engine.ids)
    assert json.loads((await post(fake(), "/v1/messages", body)).text)["content"]
