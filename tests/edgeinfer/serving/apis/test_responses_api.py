"""OpenAI's Responses API, with the openai client and plain requests."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgeinfer import Model
from edgeinfer.serving.responses.store import ResponseStore, StoredResponse
from tests.conftest import needs
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import TOOL_TEMPLATE, fake, post, served
from tests.random_models import CHAT_TEMPLATE

pytestmark = needs("openai")

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {"type": "object", "properties": {"at": {"enum": ["fox"]}}, "required": ["at"]},
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "fox"}}</tool_call>'
SETTINGS: dict[str, Any] = {"model": "fake", "temperature": 0}
VERBATIM = "{% for m in messages %}{{ m }}{% endfor %}"


@pytest.fixture
def client_of() -> Iterator[Any]:
    """Model -> a client of a server with it."""
    import openai

    servers = []

    def of(model: Model) -> Any:
        server = served(model)
        servers.append(server)
        return openai.OpenAI(base_url=server.__enter__() + "/v1", api_key="none", max_retries=0)

    yield of
    for server in servers:
        server.__exit__(None, None, None)


def prompt_of(model: Model) -> str:
    """What the engine has read, and generated."""
    return str(model.tokenizer.decode(model.engine.ids))


def test_a_response_is_stored_listed_and_deleted(client_of: Any) -> None:
    import openai

    client = client_of(fake("The fox is here."))
    response = client.responses.create(input="Hi", instructions="Be brief.", metadata={"a": "b"}, **SETTINGS)
    assert (response.output_text, response.status, response.store) == ("The fox is here.", "completed", True)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage.output_tokens == len("The fox is here.")
    assert client.responses.retrieve(response.id) == response
    items = client.responses.input_items.list(response.id).data
    assert [(item.role, item.content[0].text) for item in items] == [("user", "Hi")]
    client.responses.delete(response.id)
    for lost in (response.id, client.responses.create(input="Hi", store=False, **SETTINGS).id):
        with pytest.raises(openai.NotFoundError, match="isn't stored here"):
            client.responses.retrieve(lost)


def test_a_limited_response_is_incomplete(client_of: Any) -> None:
    response = client_of(fake()).responses.create(input="Hi", max_output_tokens=3, **SETTINGS)
    assert (response.status, response.output_text) == ("incomplete", "The")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_continues_from_a_stored_response(client_of: Any) -> None:
    import openai

    model = fake("Yes.", context=4096, template=VERBATIM)
    client = client_of(model)
    first = client.responses.create(input="One", instructions="Brief.", **SETTINGS)
    client.responses.create(input="Two", previous_response_id=first.id, **SETTINGS)
    text = prompt_of(model)
    parts = ["'user', 'content': 'One'", "'assistant', 'content': 'Yes.'", "'user', 'content': 'Two'"]
    positions = [text.find(part) for part in parts]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert "Brief." not in text
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="Two", previous_response_id="resp_0", **SETTINGS)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_text_and_calls_are_items_in_order(
    client_of: Any, streamed: bool, summary: str | None
) -> None:
    client = client_of(fake(f"<think>Which?</think>I look.\n{CALL}\n{CALL}", template=TOOL_TEMPLATE))
    body = {"input": "Hi", "tools": [LOOK], "reasoning": {"summary": summary}, **SETTINGS}
    if streamed:
        with client.responses.stream(**body) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**body)
    reasoning, message, *calls = response.output
    parts = reasoning.summary if summary else reasoning.content
    assert [part.text for part in parts] == ["Which?"]
    assert message.content[0].text == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look", {"at": "fox"})] * 2
    assert len({call.call_id for call in calls}) == 2
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_the_events_are_named_and_numbered(client_of: Any) -> None:
    client = client_of(fake(f"I look.\n{CALL}", template=TOOL_TEMPLATE))
    events = list(client.responses.create(input="Hi", tools=[LOOK], stream=True, **SETTINGS))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == {"at": "fox"}
    stored = client.responses.retrieve(events[-1].response.id)
    assert stored.output[1].arguments == "".join(deltas)


def test_calls_and_their_outputs_become_messages(client_of: Any) -> None:
    model = fake("Red.", context=4096, template=VERBATIM + "{{ tools }}")
    client = client_of(model)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "fox"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "red"},
    ]
    client.responses.create(input=items, tools=[LOOK], max_output_tokens=1, **SETTINGS)
    text = prompt_of(model)
    for part in ("'reasoning_content': 'Hm'", "'arguments': {'at': 'fox'}", "'tool_call_id': 'c1'"):
        assert part in text


@pytest.mark.parametrize("streamed", [False, True])
def test_output_items_are_valid_input(client_of: Any, streamed: bool) -> None:
    text = f"<think>Which?</think>I look.\n{CALL}"
    model = fake(text, template=VERBATIM + "{{ tools }}", context=4096)
    client = client_of(model)
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    body = {"tools": [LOOK], "store": False, **SETTINGS}
    if streamed:
        with client.responses.stream(input=items, **body) as stream:
            output = stream.get_final_response().output
    else:
        output = client.responses.create(input=items, **body).output
    items += output
    items.append({"type": "function_call_output", "call_id": output[-1].call_id, "output": "red"})
    client.responses.create(input=items, max_output_tokens=1, **body)
    parts = ["'content': 'I look.'", "'reasoning_content': 'Which?'", "'arguments': {'at': 'fox'}"]
    assert [part for part in parts if part not in prompt_of(model)] == []


def test_a_text_follows_a_schema_and_a_call_is_forced(client_of: Any) -> None:
    pytest.importorskip("llguidance")
    client = client_of(model_on(FakeEngine(seeded_logits, 4096), TOOL_TEMPLATE))
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    response = client.responses.create(input="Hi", text={"format": form}, **SETTINGS)
    assert json.loads(response.output_text) == {"a": "b"}
    for choice in ("required", {"type": "function", "name": "look"}):
        forced = client.responses.create(input="Hi", tools=[LOOK], tool_choice=choice, **SETTINGS)
        assert [json.loads(call.arguments) for call in forced.output] == [{"at": "fox"}]


def test_logprobs_are_included(client_of: Any) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, **SETTINGS}
    part = client_of(fake("The")).responses.create(input="Hi", **body).output[0].content[0]
    assert [each.token for each in part.logprobs] == ["T", "h", "e"]
    assert len(part.logprobs[0].top_logprobs) == 2


@pytest.mark.anyio
async def test_an_automatic_truncation_drops_the_oldest_messages() -> None:
    items = [{"role": "user", "content": f"{index} " + "x" * 100} for index in range(20)]
    model = fake("Yes.", template=CHAT_TEMPLATE)
    body = {"input": items, "instructions": "Brief.", "max_output_tokens": 8, **SETTINGS}
    refused = await post(model, "/v1/responses", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    reply = await post(model, "/v1/responses", {**body, "truncation": "auto"})
    assert reply.status_code == 200, reply.text
    text = prompt_of(model)
    assert "Brief." in text
    assert "19 x" in text
    assert "0 x" not in text.replace("10 x", "")


@pytest.mark.anyio
async def test_input_tokens_are_counted() -> None:
    counted = await post(fake(), "/v1/responses/input_tokens", {"input": "Hi", "model": "fake"})
    used = await post(fake(), "/v1/responses", {"input": "Hi", **SETTINGS})
    assert counted.json()["input_tokens"] == used.json()["usage"]["input_tokens"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: saw none"),
        ({"background": True}, "background: not supported here"),
        ({"messages": [{}]}, "messages: no such field; did you mean input?"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: saw a tool of type 'web_search'"),
        ({"truncation": "some"}, "truncation: saw 'some'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format: saw"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort: saw 'huge'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]: saw a part of type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: saw 'item_reference'"),
        ({"include": ["x"]}, "include: saw 'x'"),
        ({"tempature": 1}, "tempature: no such field; did you mean temperature?"),
    ],
)
async def test_an_invalid_field_is_refused(fields: dict[str, Any], message: str) -> None:
    reply = await post(fake(), "/v1/responses", {"input": "Hi", **SETTINGS, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(message)


def test_the_store_is_limited_in_number_and_bytes() -> None:
    def stored(name: str, size: int = 1) -> StoredResponse:
        return StoredResponse({"id": name}, (), ({"type": "message", "text": "x" * size},))

    store = ResponseStore(max_responses=2, max_bytes=2000)
    for name in ("a", "b"):
        store.put(stored(name))
    store.get("a")
    store.put(stored("c"))
    with pytest.raises(Exception, match="response 'b' isn't stored here"):
        store.get("b")
    store.put(stored("d", 1900))
    assert store.get("d").response == {"id": "d"}
    with pytest.raises(Exception, match="'a' isn't stored"):
        store.get("a")
    store.put(stored("e", 3000))
    with pytest.raises(Exception, match="'e' isn't stored"):
        store.get("e")
