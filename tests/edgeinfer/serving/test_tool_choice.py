"""Forced tool calls, several calls, and reasoning apart from the text, in chat completions."""

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from edgeinfer import Model
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import HELLO, TOOL_TEMPLATE, chat, events, fake
from tests.random_models import CHAT_TEMPLATE

pytestmark = pytest.mark.anyio

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["fox", "dog"]}, "p": {"$ref": "#/$defs/Point"}},
        "required": ["at", "p"],
        "$defs": {"Point": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}},
    },
}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "wait"}}]
WAIT = {"type": "function", "function": {"name": "wait"}}
ALLOWED = {"mode": "required", "tools": [WAIT]}


def random_model() -> Model:
    return model_on(FakeEngine(seeded_logits, 4096), TOOL_TEMPLATE)


def calls_in(chunks: list[Any]) -> list[tuple[str, Any]]:
    """Name and arguments of the calls of a stream."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "name" in call["function"]:
                assert call["id"].startswith("call_")
                names[call["index"]] = call["function"]["name"]
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
    return [(names[index], json.loads(arguments[index])) for index in names]


def is_valid(name: str, arguments: Any) -> bool:
    """Whether a call follows the schema of its tool."""
    if name == "wait":
        return bool(arguments == {})
    point = arguments.pop("p")
    return bool(point in ({"x": 1}, {"x": 2}) and arguments in ({"at": "fox"}, {"at": "dog"}))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tool_choice": "required"}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "look"),
        ({"tool_choice": "required", "parallel_tool_calls": True}, None),
        ({"tool_choice": {"type": "function", "function": {"name": "wait"}}}, "wait"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, "wait"),
    ],
)
async def test_a_forced_call_follows_the_schema_of_its_tool(
    streamed: bool, fields: dict[str, Any], name: str | None
) -> None:
    body = {"tools": TOOLS, "max_tokens": 1000, "stream": streamed, **fields}
    reply = await chat(body, random_model())
    assert reply.status_code == 200, reply.text
    if streamed:
        chunks = events(reply.text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
        calls = calls_in(chunks)
    else:
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in choice["message"]["tool_calls"]
        ]
    assert calls
    assert all(is_valid(*call) for call in calls)
    assert name is None or [each for each, _ in calls] == [name]


async def test_a_response_with_tools_and_a_schema_is_json_or_a_call() -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"a": {"const": 1}}}},
    }
    for seed in range(4):
        body = {"tools": TOOLS, "response_format": form, "max_tokens": 1000, "temperature": 1, "seed": seed}
        message = (await chat(body, random_model())).json()["choices"][0]["message"]
        if "tool_calls" not in message:
            assert json.loads(message["content"]) in ({"a": 1}, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice: needs tools, saw none"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice: saw 'some', wanted auto, none, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "jump"}}},
            "tool_choice: saw 'jump', wanted one of the tools: look, wait",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice: a forced call excludes response_format and grammar",
        ),
        (
            {"tools": TOOLS[:1], "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
            "tool_choice: saw 'wait', wanted functions of tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice: saw {'mode': 'auto', 'type': 'allowed_tools'}, wanted allowed_tools with mode",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": 3}, "parallel_tool_calls: saw 3, wanted true or false"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: saw"),
        ({"reasoning_effort": "huge"}, "reasoning_effort: saw 'huge', wanted one of none, minimal"),
    ],
)
async def test_an_invalid_field_about_tools_is_refused(fields: dict[str, Any], message: str) -> None:
    reply = await chat(fields, random_model())
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


async def test_tools_need_a_template_that_writes_them() -> None:
    reply = await chat({"tools": TOOLS}, fake())
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "tools: the chat template of fake doesn't support them"


async def test_without_parallel_calls_only_the_first_call_is_returned() -> None:
    text = '<tool_call>{"name": "wait", "arguments": {}}</tool_call>' * 2
    for parallel, count in ((True, 2), (False, 1)):
        body = {"tools": TOOLS, "parallel_tool_calls": parallel}
        whole = (await chat(body, fake(text, template=TOOL_TEMPLATE))).json()["choices"][0]["message"]
        assert len(whole["tool_calls"]) == count
        streamed = await chat({**body, "stream": True}, fake(text, template=TOOL_TEMPLATE))
        assert len(calls_in(events(streamed.text))) == count


THOUGHT = "<think>\nA fox, I think.\n</think>\n\nIt is a fox. "


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (CHAT_TEMPLATE, THOUGHT, "A fox, I think.", "It is a fox. "),
        (CHAT_TEMPLATE + "<think>\n", "A fox.\n</think>\nYes.", "A fox.", "Yes."),
        (CHAT_TEMPLATE + "<think>\n", "A fox. No end", "A fox. No end", ""),
        (CHAT_TEMPLATE, " No <think> here </think>", "", " No <think> here </think>"),
    ],
)
async def test_reasoning_is_apart_from_the_content(
    template: str, text: str, reasoning: str, content: str
) -> None:
    whole = (await chat({}, fake(text, template=template))).json()
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    used = whole["usage"]["completion_tokens_details"]
    assert bool(used["reasoning_tokens"]) == bool(reasoning)
    chunks = events((await chat({"stream": True}, fake(text, template=template))).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
    assert "".join(delta.get("content", "") for delta in deltas) == content


async def test_a_call_after_reasoning_is_streamed_after_it() -> None:
    text = f'{THOUGHT}<tool_call>{{"name": "look", "arguments": {{"at": "fox"}}}}</tool_call>'
    body = {"tools": TOOLS, "stream": True, "messages": HELLO}
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in events((await chat(body, fake(text, template=TOOL_TEMPLATE))).text)
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "A fox, I think."
    assert "".join(delta.get("content", "") for delta in deltas) == "It is a fox."
    kinds = [next((key for key in delta if key != "role"), "") for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
