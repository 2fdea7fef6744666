"""Models on servers with OpenAI's API: streams, reasoning, tool calls, chats, and failures."""

import threading
from types import GeneratorType
from typing import Any

import pytest

import edgeinfer
from edgeinfer.endpoint.connection import Endpoint, EndpointError
from edgeinfer.endpoint.messages import sent_messages
from edgeinfer.endpoint.remote_model import RemoteModel
from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError
from edgeinfer.results import Generation
from tests.edgeinfer.endpoint.scripted_server import CHAT, MODELS, Reply, deltas, listing, scripted_server

TEXT = "/v1/completions"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
VLLM = listing("qwen", owned_by="vllm", max_model_len=4096)
TOO_LONG = Reply({"error": {"message": "This model's maximum context length is 4096 tokens."}}, 400)


def opened(url: str, **options: Any) -> RemoteModel:
    return edgeinfer.load(engine="openai", base_url=url, **options)


def test_the_only_model_of_a_server_is_taken_with_its_context_and_program() -> None:
    with scripted_server({MODELS: VLLM}) as server, opened(server.address) as model:
        assert (model.name, model.context, model.kind.name) == ("qwen", 4096, "vLLM")
        assert model.details == (f"vLLM at {server.address}/v1 computes",)
        assert model.warnings == ()


def test_a_stream_has_the_text_the_reason_and_the_speed_of_the_server() -> None:
    chat = deltas(
        {"role": "assistant", "content": ""}, {"content": "A "}, {"content": "fox."}, finish="length"
    )
    with scripted_server({MODELS: VLLM, CHAT: chat}) as server:
        stream = opened(server.address).stream("Hi", raw=False, max_tokens=3)
        assert [token.text for token in stream] == ["A ", "fox."]
        result = stream.result
    assert (result.text, result.finish_reason) == ("A fox.", "length")
    assert (result.speed.prompt_tokens, result.speed.generated_tokens) == (7, 3)
    assert result.context_tokens == 10
    assert result.speed.seconds_to_first_token > 0
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["model"], body["max_tokens"], "temperature" in body) == ("qwen", 3, False)


def test_a_length_without_a_limit_means_that_the_context_is_full() -> None:
    with scripted_server({MODELS: VLLM, CHAT: deltas({"content": "A"}, finish="length")}) as server:
        stream = opened(server.address).stream("Hi", raw=False)
        list(stream)
        assert stream.result.finish_reason == "context"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_between_marks_as_models_write_it(name: str) -> None:
    chat = deltas({name: "Hm"}, {name: "m."}, {"content": "A fox."})
    with scripted_server({MODELS: VLLM, CHAT: chat}) as server:
        stream = opened(server.address).stream("Hi", raw=False)
        assert "".join(token.text for token in stream) == "<think>\nHmm.\n</think>\n\nA fox."


def test_a_whole_response_has_reasoning_and_several_completions() -> None:
    choices = [
        {"message": {"content": "A", "reasoning_content": "Hm."}, "finish_reason": "stop"},
        {"message": {"content": "B"}, "finish_reason": "length"},
    ]
    whole = Reply({"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 8}})
    with scripted_server({MODELS: VLLM, CHAT: whole}) as server:
        completions = opened(server.address).generate("Hi", n=2, raw=False, seed=3)
    assert [one.text for one in completions] == ["<think>\nHm.\n</think>\n\nA", "B"]
    assert [one.speed.generated_tokens for one in completions] == [4, 4]
    assert (server.bodies[0]["n"], server.bodies[0]["seed"]) == (2, 3)


def test_a_raw_prompt_is_a_text_completion() -> None:
    reply = Reply(events=[{"choices": [{"index": 0, "text": " a fox", "finish_reason": "stop"}]}])
    with scripted_server({MODELS: VLLM, TEXT: reply}) as server:
        assert [token.text for token in opened(server.address).stream("Once")] == [" a fox"]
    assert (server.bodies[0]["prompt"], server.bodies[0]["max_tokens"]) == ("Once", None)


def test_a_chat_calls_tools_whose_calls_arrive_in_parts() -> None:
    parts = [
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"ci'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Bern"}'}}]},
        {"tool_calls": [{"index": 1, "id": "y", "function": {"name": "weather", "arguments": ""}}]},
    ]
    replies = [deltas({"content": "Let me look."}, *parts, finish="tool_calls"), deltas({"content": "Rain."})]
    with scripted_server({MODELS: VLLM, CHAT: replies}) as server:
        chat = opened(server.address).chat(system="Be brief.", tools=[WEATHER])
        assert chat.say("Weather?").text == "Let me look."
        assert [(call.name, call.arguments) for call in chat.tool_calls] == [
            ("weather", {"city": "Bern"}),
            ("weather", {}),
        ]
        assert chat.say_results([{"sky": "gray"}, "sunny"]).text == "Rain."
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assistant, first, second = server.bodies[1]["messages"][2:]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert (first["content"], second["content"]) == ('{"sky": "gray"}', "sunny")
    assert server.bodies[0]["tools"] == [WEATHER]


def test_text_that_looks_like_a_call_is_no_call() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    with scripted_server({MODELS: VLLM, CHAT: deltas({"content": text})}) as server:
        chat = opened(server.address).chat(tools=[WEATHER])
        chat.say("Hi")
        assert chat.tool_calls == ()


def test_earlier_reasoning_is_not_sent_again() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA fox."},
    ]
    assert sent_messages(messages)[1] == {"role": "assistant", "content": "A fox."}


def test_the_oldest_messages_are_dropped_if_the_server_refuses_the_length() -> None:
    replies = [deltas({"content": "A"}), deltas({"content": "B"}), TOO_LONG, deltas({"content": "C"})]
    with scripted_server({MODELS: VLLM, CHAT: replies}) as server:
        chat = opened(server.address).chat()
        chat.say("one")
        chat.say("two")
        answer = chat.say("three")
    assert (answer.text, answer.dropped_messages) == ("C", 1)
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["two", "B", "three"]
    assert len(chat.messages) == 6


def test_a_last_message_that_is_too_long_is_refused() -> None:
    with scripted_server({MODELS: VLLM, CHAT: TOO_LONG}) as server:
        chat = opened(server.address).chat()
        with pytest.raises(ContextOverflowError, match="maximum context length is 4096 tokens"):
            chat.say("one")
        assert chat.messages == []


def test_cancelling_closes_the_connection_and_keeps_the_text() -> None:
    waits = threading.Event()
    reply = Reply(events=[{"choices": [{"index": 0, "delta": {"content": "A fox"}}]}], waits=waits)
    ended: list[Generation] = []
    with scripted_server({MODELS: VLLM, CHAT: reply}) as server:
        stream = opened(server.address).stream("Hi", raw=False)
        assert next(stream).text == "A fox"
        stream.cancel()
        ended.append(stream.result)
        assert server.left.wait(20)
        assert list(stream) == []
        waits.set()
    assert (ended[0].text, ended[0].finish_reason) == ("A fox", "cancelled")


def test_progress_can_cancel_a_stream_that_has_no_token_yet() -> None:
    waits = threading.Event()
    with scripted_server({MODELS: VLLM, CHAT: Reply(events=[], waits=waits)}) as server:
        stream = opened(server.address).stream("Hi", raw=False, progress=lambda done, total: stream.cancel())
        assert list(stream) == []
        assert stream.result.finish_reason == "cancelled"
        assert server.left.wait(20)
        waits.set()


def test_each_prompt_of_a_list_gets_its_completion_or_its_error() -> None:
    whole = Reply({"choices": [{"message": {"content": "A"}, "finish_reason": "stop"}]})
    refused = Reply({"error": {"message": "no"}}, 422)
    with scripted_server({MODELS: VLLM, CHAT: [refused, whole]}) as server:
        results = list(opened(server.address).generate_each(["a", "b", "c"], raw=False))
    errors = [one for one in results if isinstance(one, Exception)]
    assert (len(results), len(errors)) == (3, 1)
    assert str(errors[0]).endswith("/v1/chat/completions: 422, no")


def test_closing_the_iterator_ends_its_requests_in_progress_and_no_others() -> None:
    waits = threading.Event()
    fast, slow = Reply({"choices": [{"text": "A"}]}), Reply(events=[], waits=waits)
    with scripted_server({MODELS: VLLM, TEXT: fast, CHAT: slow}) as server:
        model = opened(server.address)
        results = model.generate_each(["a", [{"role": "user", "content": "b"}]])
        first = next(results)
        assert isinstance(first, Generation)
        assert first.text == "A"
        while len(server.bodies) < 2:
            assert not server.left.is_set()
        assert isinstance(results, GeneratorType)
        results.close()
        assert server.left.wait(20)
        assert model.generate("c").text == "A"
        waits.set()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply({"error": {"message": "bad\nkey"}}, 401), "401, bad key; give the server's key (key=)"),
        (Reply({"detail": "gone"}, 404), "404, gone"),
        (Reply({"message": "busy"}, 503), "503, busy"),
        (Reply(b"<html>", 500), "500, without a message"),
        (Reply("", 307, headers={"Location": "http://x/"}), "307, redirects to http://x/; give that address"),
        (Reply(events=[{"error": {"message": "GPU lost"}}]), "chat/completions: GPU lost"),
        (Reply(events=["data: [1]\n\n"]), "saw the event b'[1]', wanted a JSON object"),
        (Reply(events=[], done=False), "the response ended before its last event"),
    ],
)
def test_a_failure_is_one_clear_line(reply: Reply, message: str) -> None:
    with scripted_server({MODELS: VLLM, CHAT: reply}) as server:
        stream = opened(server.address).stream("Hi", raw=False)
        with pytest.raises(EndpointError) as failure:
            next(stream)
    text = str(failure.value)
    assert message in text
    assert text.startswith(server.address)
    assert "\n" not in text


def test_a_server_that_is_not_there_is_named() -> None:
    with scripted_server({}) as server:
        address = server.address
    with pytest.raises(EndpointError, match=f"{address}/v1: can't be reached .*; is the server up"):
        opened(address)


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://x", "", "http://", "http://a b", "http://x:y"])
def test_an_address_must_be_one(address: str) -> None:
    with pytest.raises(SettingError, match=r"base_url: saw .*, wanted an address as http"):
        Endpoint(address)


def test_several_models_need_a_name_and_an_unlisted_one_is_mentioned() -> None:
    with scripted_server({MODELS: listing("a", "b")}) as server:
        with pytest.raises(SettingError, match=r"model: saw none, wanted the name of one; .* has a, b"):
            opened(server.address)
        model = edgeinfer.load("c", engine="openai", base_url=server.address)
        assert model.warnings == (f"{server.address}/v1 lists no model 'c'; it has a, b",)


def test_a_server_without_a_list_takes_any_name() -> None:
    with scripted_server({}) as server:
        model = edgeinfer.load("c", engine="openai", base_url=server.address, context=100)
    assert (model.name, model.context, model.warnings) == ("c", 100, ())


def test_the_key_is_a_bearer_token() -> None:
    with scripted_server({MODELS: VLLM}) as server:
        opened(server.address, key="secret")
    assert server.seen[0][1]["Authorization"] == "Bearer secret"
    assert Endpoint("http://example.org", "secret").exposes_key
    assert not Endpoint("https://example.org", "secret").exposes_key


def test_a_key_with_a_line_break_is_refused() -> None:
    with pytest.raises(SettingError, match="key: wanted printable ASCII characters"):
        Endpoint("http://127.0.0.1", "a\nb")


def test_a_closed_model_takes_no_prompts() -> None:
    with scripted_server({MODELS: VLLM}) as server:
        model = opened(server.address)
        model.close()
        with pytest.raises(EdgeInferError, match="qwen has been closed"):
            model.stream("Hi")
