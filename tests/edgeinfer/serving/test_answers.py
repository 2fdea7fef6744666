"""Chats, completions and embeddings over HTTP, with the openai client and plain requests."""

import json
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")

import edgeinfer
from edgeinfer import Model
from tests.edgeinfer.fake_engine import FIRST_BYTE, FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import (
    CHAT,
    HELLO,
    TOOL_TEMPLATE,
    Fields,
    chat,
    client,
    events,
    fake,
    post,
    served,
)

pytestmark = pytest.mark.anyio


async def test_a_chat_response_is_returned_complete() -> None:
    reply = await chat({"model": "fake"})
    result = reply.json()
    assert reply.status_code == 200
    assert (result["object"], result["model"]) == ("chat.completion", "fake")
    item = result["choices"][0]
    assert item["message"] == {"role": "assistant", "content": "The fox is here."}
    assert item["finish_reason"] == "stop"
    used = result["usage"]
    assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
    assert used["completion_tokens"] == len("The fox is here.")


async def test_a_chat_response_streams_the_same_text() -> None:
    result = events((await chat({"stream": True, "stream_options": {"include_usage": True}})).text)
    assert {each["object"] for each in result} == {"chat.completion.chunk"}
    assert len({each["id"] for each in result}) == 1
    *chunks, last, used = result
    assert "".join(each["choices"][0]["delta"]["content"] for each in chunks) == "The fox is here."
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    assert used["choices"] == []
    assert used["usage"]["completion_tokens"] == len("The fox is here.")


async def test_several_responses_follow_their_limits() -> None:
    result = (await chat({"n": 2, "max_tokens": 3})).json()
    assert [(each["index"], each["message"]["content"]) for each in result["choices"]] == [
        (0, "The"),
        (1, "The"),
    ]
    assert {each["finish_reason"] for each in result["choices"]} == {"length"}
    streamed = events((await chat({"n": 2, "max_completion_tokens": 3, "stream": True})).text)
    assert {each["choices"][0]["index"] for each in streamed} == {0, 1}


async def test_several_responses_have_consecutive_seeds() -> None:
    model = model_on(FakeEngine(seeded_logits, 512))
    body = {"n": 3, "max_tokens": 12, "seed": 5, "temperature": 1.0}
    together = [each["message"]["content"] for each in (await chat(body, model)).json()["choices"]]
    assert len(set(together)) == 3
    for index, content in enumerate(together):
        alone = (await chat({**body, "n": 1, "seed": 5 + index}, model)).json()
        assert alone["choices"][0]["message"]["content"] == content


async def test_a_response_follows_a_schema() -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    model = model_on(FakeEngine(seeded_logits, 512))
    result = (await chat({"response_format": form, "max_tokens": 300}, model)).json()
    assert json.loads(result["choices"][0]["message"]["content"]) == {"a": "b"}
    refused = await chat({"response_format": {**form, "json_schema": {"schema": {"enum": []}}}}, model)
    assert refused.status_code == 400
    assert "Unsatisfiable schema" in refused.json()["error"]["message"]


async def contents(tools: list[Any], text: str) -> list[str]:
    """The contents of the chunks of a streamed response with tools."""
    output = await chat({"tools": tools, "stream": True}, fake(text, template=TOOL_TEMPLATE))
    deltas = [each["choices"][0]["delta"] for each in events(output.text)]
    return [delta["content"] for delta in deltas if delta.get("content")]


async def test_tool_calls_are_returned_complete_and_streamed() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    text = '<tool_call>{"name": "look", "arguments": {"at": "ä"}}</tool_call>'
    result = (await chat({"tools": tools}, fake(text, template=TOOL_TEMPLATE))).json()["choices"][0]
    assert result["finish_reason"] == "tool_calls"
    assert result["message"]["content"] is None
    call = result["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"at": "ä"}
    chunks = events((await chat({"tools": tools, "stream": True}, fake(text, template=TOOL_TEMPLATE))).text)
    deltas = [each["choices"][0]["delta"] for each in chunks]
    pieces = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["look"]
    assert len(pieces) > 3
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert (await contents(tools, "No need."))[0] == "N"
    assert "".join(await contents(tools, "No need. ")) == "No need. "
    spoken = await contents(tools, f"I'll  look <here>.\n\n{text}")
    assert len(spoken) > 10
    assert "".join(spoken) == "I'll  look <here>."
    assert await contents(tools, '{"a": 1}') == ['{"a": 1}']
    assert (await chat({"tools": tools, "tool_choice": "none"}, fake(text, template=TOOL_TEMPLATE))).json()[
        "choices"
    ][0]["message"]["content"] == text


async def test_logprobs_include_token_bytes() -> None:
    result = (await chat({"logprobs": True, "top_logprobs": 2, "max_tokens": 2})).json()["choices"][0][
        "logprobs"
    ]["content"]
    assert [each["token"] for each in result] == ["T", "h"]
    assert result[0]["bytes"] == list(b"T")
    assert result[0]["logprob"] == pytest.approx(0, abs=1e-3)
    assert len(result[0]["top_logprobs"]) == 2


async def test_a_completion_continues_the_prompt() -> None:
    body = {"prompt": ["Once", [1, 5]], "max_tokens": 3, "temperature": 0}
    result = (await post(fake(), "/v1/completions", body | {"logprobs": 1})).json()
    assert result["object"] == "text_completion"
    assert result["choices"][0]["text"] == "The"
    assert result["choices"][0]["logprobs"]["tokens"] == ["T", "h", "e"]
    assert result["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]
    streamed = await post(fake(), "/v1/completions", {"prompt": "Once", "stream": True, "temperature": 0})
    assert "".join(each["choices"][0]["text"] for each in events(streamed.text)) == "The fox is here."


async def test_an_echoed_prompt_precedes_the_completion_complete_and_streamed() -> None:
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "echo": True}
    result = (await post(fake(), "/v1/completions", body)).json()
    assert result["choices"][0]["text"] == "OnceThe"
    streamed = events((await post(fake(), "/v1/completions", body | {"stream": True})).text)
    assert [each["choices"][0]["text"] for each in streamed][:2] == ["Once", "T"]
    assert "".join(each["choices"][0]["text"] for each in streamed) == "OnceThe"


async def test_every_sampler_is_a_request_field(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[dict[str, Any]] = []
    model, generate = fake(), Model.stream_async

    def received(self: Model, prompt: Any, **settings: Any) -> Any:
        requested.append(settings)
        return generate(self, prompt, **settings)

    monkeypatch.setattr(Model, "stream_async", received)
    given = {
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ["x"],
    }
    assert (await chat(given, model)).status_code == 200
    assert requested[0].items() >= {**given, "dry_sequence_breakers": ("x",)}.items()


async def test_embeddings_are_returned() -> None:
    reply = (await post(fake(), "/v1/embeddings", {"input": ["a b", "c"]})).json()
    assert [each["index"] for each in reply["data"]] == [0, 1]
    assert np.linalg.norm(reply["data"][0]["embedding"]) == pytest.approx(1)
    packed = (await post(fake(), "/v1/embeddings", {"input": "c", "encoding_format": "base64"})).json()
    assert isinstance(packed["data"][0]["embedding"], str)


def test_the_openai_client_works() -> None:
    openai = pytest.importorskip("openai")
    with edgeinfer.load("tiny", device="cpu", draft=None) as model, served(model) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [each.id for each in client.models.list()] == ["tiny"]
        settings: Fields = {"model": "tiny", "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(messages=HELLO, **settings)
        chunks = list(client.chat.completions.create(messages=HELLO, stream=True, **settings))
        output = "".join(each.choices[0].delta.content or "" for each in chunks)
        assert output == whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 12
        text = client.completions.create(prompt="Once upon a time", **settings)
        assert text.choices[0].text == model.generate("Once upon a time", max_tokens=12, temperature=0.0).text
        vectors = client.embeddings.create(model="tiny", input=["A fox.", "A dog."])
        np.testing.assert_allclose(vectors.data[0].embedding, model.embed("A fox."), rtol=1e-6)
        assert vectors.usage.prompt_tokens == model.text_vectors(["A fox.", "A dog."]).tokens
        with pytest.raises(openai.BadRequestError, match="the prompt has"):
            client.chat.completions.create(messages=[{"role": "user", "content": "fox " * 5000}], **settings)
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            client.chat.completions.create(messages=HELLO, model="other")


async def test_a_models_sampling_parameters_are_below_those_of_a_request() -> None:
    async def content(**fields: Any) -> str:
        model = fake("The fox.")
        model.sampling = {"logit_bias": {FIRST_BYTE + ord("T"): -math.inf}}
        found = (await chat({"max_tokens": 2, **fields}, model)).json()
        return str(found["choices"][0]["message"]["content"])

    assert not (await content()).startswith("T")
    assert (await content(logit_bias={})) == "Th"


async def test_a_repeated_request_takes_the_stored_completion() -> None:
    model = fake()
    body = {"messages": HELLO, "temperature": 0}
    async with client(model, response_cache=4) as http:
        first = (await http.post(CHAT, json=body)).json()
        forwards = read_by(model)
        again = (await http.post(CHAT, json=body)).json()
        streamed = events((await http.post(CHAT, json={**body, "stream": True})).text)
        assert read_by(model) == forwards
        other = (await http.post(CHAT, json={**body, "max_tokens": 3})).json()
        assert len(read_by(model)) > len(forwards)
    assert [each["choices"][0]["message"]["content"] for each in (first, again)] == ["The fox is here."] * 2
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in streamed) == "The fox is here."
    assert again["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    assert other["choices"][0]["message"]["content"] == "The"
    async with client(model) as http:
        forwards = read_by(model)
        for _ in range(2):
            await http.post(CHAT, json=body)
            assert len(read_by(model)) > len(forwards)
            forwards = read_by(model)


def read_by(model: Model) -> list[int]:
    """The token counts of the engine's forwards."""
    engine: Any = model.engine
    return list(engine.read)
