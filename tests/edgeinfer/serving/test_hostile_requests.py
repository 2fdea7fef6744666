"""Foreign pages, unknown fields, wrong and oversized values: each is refused in one short line."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("starlette")

from tests.edgeinfer.serving.http_client import (
    CHAT,
    HELLO,
    JSON,
    TOOL_TEMPLATE,
    chat,
    client,
    events,
    fake,
    post,
)
from tests.edgeinfer.serving.mutations import mutated

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def sent(headers: dict[str, str], path: str = CHAT) -> Any:
    async def ask() -> Any:
        async with client(fake()) as http:
            body = json.dumps({"messages": HELLO, "max_tokens": 2})
            return await http.post(path, content=body, headers=headers)

    return await ask()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Host": "testserver"}, 400),
        ({"Host": "evil.example"}, 400),
        ({"Host": "[::1"}, 400),
        ({"Host": "[::1]:8080"}, 200),
        ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}, 200),
    ],
)
async def test_only_local_programs_and_pages_are_accepted(headers: Any, status: int) -> None:
    reply = await sent({**JSON, **headers})
    assert reply.status_code == status
    if status != 200:
        assert reply.json()["error"]["message"]


async def test_a_body_of_curl_without_a_type_gets_the_header_to_add() -> None:
    reply = await sent({**JSON, "Content-Type": "application/x-www-form-urlencoded"})
    assert reply.json()["error"]["message"].endswith('with curl: -H "Content-Type: application/json"')


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"max_tokns": 5}, "max_tokns: no such field; did you mean max_tokens?"),
        ({"foo": 1}, "foo: no such field; did you mean "),
        ({"num_ctx": 5}, "num_ctx: no such field; the context is set when the server starts (--context)"),
        ({"n_predict": 5}, "n_predict: no such field; did you mean max_tokens?"),
        ({"stop_token_ids": [5]}, "stop_token_ids: no such field; did you mean "),
        ({"x" * 5000: 5}, "no such field; did you mean "),
        ({"reasoning_effort": "much"}, "reasoning_effort: saw 'much', wanted one of none, minimal, low"),
        ({"reasoning_effort": 3}, "reasoning_effort: saw 3, wanted one of none"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat template doesn't read 'enable_thinking'",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: saw [1], wanted an object"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages' is set by edgeinfer"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream true"),
        (
            {"stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge: no such field; did you mean include_usage?",
        ),
        ({"response_format": {"type": "text", "schem": 1}}, "response_format.schem: no such field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": 1}}},
            "response_format.json_schema.stric: no such field; did you mean strict?",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "nme": "y"}]},
            "messages[0].nme: no such field; did you mean name?",
        ),
        ({"tools": [TOOL]}, "tools: the chat template of fake doesn't support them"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs true"),
        ({f"f{i}": 1 for i in range(60_000)}, "the body: saw 60002 fields, wanted 100 at most"),
    ],
)
async def test_a_field_without_effect_is_an_error(body: Any, output: str) -> None:
    reply = await chat({"temperature": None, **body})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert output in message
    assert len(message) < 300


async def test_fields_that_change_nothing_are_listed_as_warnings() -> None:
    body = {"user": "me", "store": False, "metadata": None, "best_of": 1, "suffix": None}
    result = (await chat(body)).json()
    assert result["warnings"] == ["user: has no effect here", "store: has no effect here"]
    assert "warnings" not in (await chat({})).json()
    streamed = events((await chat({**body, "stream": True})).text)
    assert [each.get("warnings") for each in streamed[:2]] == [result["warnings"], None]
    vectors = (await post(fake(), "/v1/embeddings", {"input": "x", "user": "me"})).json()
    assert vectors["warnings"] == ["user: has no effect here"]
    repeated = [{"role": "assistant", "content": "x", "refusal": "no", "annotations": []}, *HELLO]
    assert (await chat({"messages": repeated})).json()["warnings"] == [
        "messages[0].refusal: has no effect here"
    ]


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"tools": [{"function": "x"}]}, "tools[0]: saw {'function': 'x'}, wanted a function"),
        ({"tools": [{"function": {"name": ["f"]}}]}, "tools[0]: saw the name ['f'], wanted a text"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0]: saw the parameters 5"),
        ({"tools": "x"}, "tools: saw 'x', wanted a list of functions"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls: saw 5"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the body: saw half a surrogate pair"),
        ({"messages": [{"role": "user", "content": "x"}] * 5_000}, "messages: saw 5000, wanted 4096 at most"),
        ({"seed": 10**400}, "seed: saw 1000"),
        ({"temperature": 10**400}, "temperature: saw 1000"),
        ({"temperature": "a" * 100_000}, "temperature: saw 'aaaa"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: saw 21, wanted 0 to 20"),
        ({"stop": ["x"] * 65}, "stop: saw 65, wanted 64 at most"),
        ({"stop": ["x" * 1001]}, "stop: saw 1001 characters, wanted 1000 at most"),
        ({"logit_bias": {str(i): 1 for i in range(2_000)}}, "logit_bias: saw 2000, wanted 1024 at most"),
        ({"stream": "yes"}, "stream: saw 'yes', wanted true or false"),
        ({"model": ["x"]}, "model: saw ['x'], wanted a text"),
        ({"tools": [TOOL] * 129}, "tools: saw 129, wanted 128 at most"),
    ],
)
async def test_wrong_and_oversized_values_give_a_short_error(body: Any, output: str) -> None:
    reply = await post(fake(template=TOOL_TEMPLATE), CHAT, {"messages": HELLO, **body})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert output in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        ("completions", {"prompt": ["x"] * 200_001}, "prompt: saw 200001, wanted 64 at most"),
        (
            "completions",
            {"prompt": ["x"] * 9, "n": 8},
            "prompt: saw 9 prompts with n 8, wanted 64 completions",
        ),
        ("completions", {"prompt": [1] * 2_000}, "the prompt has 2000 tokens, the context holds 512"),
        ("embeddings", {"input": ["x"] * 3_000}, "input: saw 3000, wanted 2048 at most"),
    ],
)
async def test_requests_hold_a_bounded_number_of_prompts_and_texts(path: str, body: Any, output: str) -> None:
    reply = await post(fake(), f"/v1/{path}", body)
    assert reply.status_code == 400
    assert output in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status", "output"),
    [
        (b'{"messages": NaN}', 400, "saw NaN, which JSON doesn't have"),
        (b"[" * 100_000, 400, "the body isn't JSON"),
        (b'{"a": ' + b"9" * 5_000 + b"}", 400, "the body isn't JSON"),
        (b"\xff\xfe", 400, "the body isn't JSON"),
        (b" " * (1 << 20) + b" ", 413, "the body: saw 1048577 bytes, wanted 1048576 at most"),
    ],
)
async def test_an_invalid_or_oversized_body_is_refused(raw: bytes, status: int, output: str) -> None:
    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.post(CHAT, content=raw, headers=JSON)

    reply = await ask()
    assert reply.status_code == status
    assert output in reply.json()["error"]["message"]
    assert len(reply.text) < 400


async def test_a_body_without_a_length_is_bounded_too() -> None:
    async def parts() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    async def ask() -> Any:
        async with client(fake()) as http:
            return await http.post(CHAT, content=parts(), headers=JSON)

    reply = await ask()
    assert reply.status_code == 413


async def test_a_long_path_is_shortened_in_the_error() -> None:
    reply = await post(fake(), "/" + "x" * 10_000, {})
    assert reply.status_code == 404
    assert len(reply.text) < 300


@pytest.mark.slow
async def test_malformed_tool_calls_are_ignored() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 3_000 + "</tool_call>"
    result = await post(
        fake(text, 8192, TOOL_TEMPLATE), CHAT, {"messages": HELLO, "temperature": 0, "tools": [TOOL]}
    )
    assert result.json()["choices"][0]["message"]["content"] == text


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "y"}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "y"}]},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "z"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "y"},
]
SHOTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        CHAT,
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "y"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 4,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": BLOCKS,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
            "max_tokens": 4,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": [{"name": "f", "input_schema": {}}]}),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}},
            "truncation": "auto",
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 4,
        },
    ),
    (
        "/api/chat",
        {
            "model": "fake",
            "messages": [*HELLO, {"role": "tool", "tool_name": "f", "content": "y"}],
            "tools": [TOOL],
            "options": {"num_predict": 4, "stop": ["x"], "num_ctx": 8},
            "format": "json",
            "keep_alive": "5m",
            "think": True,
        },
    ),
    ("/api/generate", {"model": "fake", "prompt": "x", "system": "s", "options": {"num_predict": 4}}),
    ("/api/embed", {"model": "fake", "input": ["x"]}),
    ("/api/show", {"model": "fake", "verbose": False}),
)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("path", "body"), SHOTS, ids=[path for path, _ in SHOTS])
async def test_mutated_requests_of_every_api_are_served_or_refused(
    path: str, body: dict[str, Any], streamed: bool, scaled: Callable[[int], int]
) -> None:
    pytest.importorskip("llguidance")
    source = random.Random(f"{path} {streamed}")
    streams = streamed and not path.endswith(("count_tokens", "embed", "show"))
    async with client(fake(template=TOOL_TEMPLATE, context=4096)) as http:
        assert (await http.post(path, json=body | {"stream": True} if streams else body)).status_code == 200
        for _ in range(scaled(300)):
            changed = mutated(body, source) | ({"stream": streams} if streams else {})
            raw = json.dumps(changed).encode()
            reply = await http.post(path, content=raw, headers=JSON)
            assert reply.status_code < 500, raw[:2000]
            if reply.status_code != 200:
                assert len(reply.text) < 700, raw[:2000]
