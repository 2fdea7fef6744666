"""An agent's loop of 2 and 10 tool calls with each client library, against the built-in model.

The calls are forced through constrained decoding, so that a model of 30 million parameters makes valid ones.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

import edgeinfer
from tests.edgeinfer.serving.http_client import served

SLOW_RUNS = [pytest.param(streamed, 10, marks=pytest.mark.slow) for streamed in (False, True)]
RUNS = pytest.mark.parametrize(("streamed", "calls"), [(False, 2), *SLOW_RUNS])
TOKENS_PER_CALL = 25
"""A prompt has more of them after its calls."""
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER, "operation": {"enum": ["plus", "minus"]}},
    "required": ["a", "b", "operation"],
}
NAME, TASK = "calculate", "Count the foxes."
SAMPLING = {"temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with (
        edgeinfer.load("tiny", device="cpu", draft=None, context=8192, chat_template=TEMPLATE) as model,
        served(model) as address,
    ):
        yield address


def calculated(name: str, arguments: Any) -> str:
    """The result of the tool; the arguments must follow its schema."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    assert (name, arguments.keys()) == (NAME, {"a", "b", "operation"})
    a, b = arguments["a"], arguments["b"]
    assert isinstance(a, int)
    assert isinstance(b, int)
    assert max(a, b) < 100
    return str(a + b if arguments["operation"] == "plus" else a - b)


@pytest.mark.slow
@RUNS
def test_an_agent_calls_tools_with_openais_chat_completions(url: str, streamed: bool, calls: int) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    tool = {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}
    body: dict[str, Any] = {"model": "tiny", "tools": [tool], **SAMPLING}
    cached = 0
    for _ in range(calls):
        choice = {"tool_choice": "required"}
        if streamed:
            with client.chat.completions.stream(messages=messages, **body, **choice) as stream:
                reply = stream.get_final_completion()
        else:
            reply = client.chat.completions.create(messages=messages, **body, **choice)
            cached = reply.usage.prompt_tokens_details.cached_tokens
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls"
        messages.append(message.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"index"}}}))
        for call in message.tool_calls:
            result = calculated(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(messages) == 1 + 2 * calls
    assert streamed or cached > TOKENS_PER_CALL * calls
    final = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=8, **body)
    assert final.choices[0].message.content


@pytest.mark.slow
@RUNS
def test_an_agent_calls_tools_with_stored_responses(url: str, streamed: bool, calls: int) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "name": NAME, "parameters": SCHEMA, "strict": True}
    body: dict[str, Any] = {"model": "tiny", "tools": [tool], "temperature": 1.0, "extra_body": {"seed": 7}}
    given: Any = TASK
    previous, count = None, 0
    for _ in range(calls):
        body |= {"tool_choice": "required", "previous_response_id": previous}
        if streamed:
            with client.responses.stream(input=given, **body) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=given, **body)
        given, previous = [], response.id
        for call in response.output:
            count += 1
            result = calculated(call.name, call.arguments)
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    assert count == calls
    body |= {"tool_choice": "none", "previous_response_id": previous}
    final = client.responses.create(input=given, max_output_tokens=16, **body)
    assert final.output_text
    assert final.usage.input_tokens > TOKENS_PER_CALL * calls


@pytest.mark.slow
@RUNS
def test_an_agent_calls_tools_with_anthropics_messages(url: str, streamed: bool, calls: int) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    tool = {"name": NAME, "input_schema": SCHEMA}
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "tools": [tool], "extra_body": SAMPLING}
    for _ in range(calls):
        body |= {"messages": messages, "tool_choice": {"type": "any"}}
        if streamed:
            with client.messages.stream(**body) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**body)
        assert message.stop_reason == "tool_use"
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculated(block.name, block.input)}
            for block in message.content
        ]
        messages.append({"role": "user", "content": results})
    assert len(messages) == 1 + 2 * calls
    final = client.messages.create(**{**body, "tool_choice": {"type": "none"}, "max_tokens": 8})
    assert final.content[0].text
    counted = client.messages.count_tokens(model="tiny", messages=messages)
    assert counted.input_tokens > TOKENS_PER_CALL * calls


@pytest.mark.slow
@RUNS
def test_an_agent_calls_tools_with_ollamas_chat(url: str, streamed: bool, calls: int) -> None:
    """Ollama's API has no `tool_choice`: `format` has the schema of a call."""
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=url)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    tool = {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}
    call_schema = {
        "type": "object",
        "properties": {"name": {"const": NAME}, "arguments": SCHEMA},
        "required": ["name", "arguments"],
    }
    count = 0
    for _ in range(calls):
        body = {"tools": [tool], "format": call_schema, "options": SAMPLING, "stream": streamed}
        replies = client.chat("tiny", messages, **body)
        for reply in replies if streamed else [replies]:
            for call in reply.message.tool_calls or []:
                count += 1
                result = calculated(call.function.name, dict(call.function.arguments))
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    assert count == calls
    assert client.chat("tiny", messages, options={**SAMPLING, "num_predict": 8}).message.content
