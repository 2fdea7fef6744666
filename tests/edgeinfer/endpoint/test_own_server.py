"""The engine openai against the project's own server: the same texts as those of the model itself."""

import pytest

pytest.importorskip("starlette")

import edgeinfer
from edgeinfer import Model
from edgeinfer.chat_templates.tool_calls import ToolCall
from edgeinfer.endpoint.remote_model import RemoteModel
from edgeinfer.errors import ContextOverflowError, SettingError
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import TOOL_TEMPLATE, fake, served

LIMITS = {"max_tokens": 12, "temperature": 0.0}


def seeded() -> Model:
    return model_on(FakeEngine(seeded_logits, 512))


def opened(url: str, key: str | None = None) -> RemoteModel:
    return edgeinfer.load(engine="openai", base_url=url, key=key)


@pytest.mark.parametrize("raw", [True, False])
def test_streams_and_whole_completions_have_the_texts_of_the_model(raw: bool) -> None:
    expected = seeded().generate("Hi", raw=raw, max_tokens=12, temperature=0.0)
    with served(seeded()) as url, opened(url) as model:
        stream = model.stream("Hi", raw=raw, max_tokens=12, temperature=0.0)
        assert "".join(token.text for token in stream) == expected.text
        assert stream.result.finish_reason == expected.finish_reason == "length"
        assert stream.result.speed.generated_tokens == len(expected.ids)
        assert stream.result.speed.prompt_tokens == len(expected.prompt_ids)
        whole = model.generate("Hi", raw=raw, max_tokens=12, temperature=0.0)
        assert whole.text == expected.text


def test_samplers_reach_the_server() -> None:
    expected = seeded().generate("Hi", max_tokens=8, seed=5, temperature=1.3, top_k=3, dry_multiplier=0.5)
    with served(seeded()) as url, opened(url) as model:
        got = model.generate("Hi", max_tokens=8, seed=5, temperature=1.3, top_k=3, dry_multiplier=0.5)
        assert got.text == expected.text


def test_a_chat_has_the_responses_of_the_model() -> None:
    local = seeded().chat(system="S", max_tokens=6, temperature=0.0)
    with served(seeded()) as url, opened(url) as model:
        remote = model.chat(system="S", max_tokens=6, temperature=0.0)
        for text in ("Hi", "And?"):
            assert remote.say(text).text == local.say(text).text
        assert remote.messages == local.messages
        assert remote.context_used == local.context_used
        again = remote.regenerate()
        assert "".join(token.text for token in again) == local.messages[-1]["content"]


def test_tool_calls_come_through() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with served(fake(text, template=TOOL_TEMPLATE)) as url, opened(url) as model:
        chat = model.chat(tools=tools)
        chat.say("Hi")
        assert chat.tool_calls == (ToolCall("f", {"x": 1}),)


def test_reasoning_comes_through() -> None:
    with served(fake("<think>\nHm.\n</think>\n\nA fox.")) as url, opened(url) as model:
        stream = model.stream("Hi", raw=False)
        assert "".join(token.text for token in stream) == "<think>\nHm.\n</think>\n\nA fox."


def test_errors_of_the_server_are_those_of_the_library() -> None:
    with served(seeded(), key="k") as url, opened(url, "k") as model:
        with pytest.raises(ContextOverflowError):
            model.generate("x" * 600)
        with pytest.raises(SettingError, match="temperature: saw -1"):
            model.stream("Hi", temperature=-1)
        with pytest.raises(edgeinfer.EdgeInferError, match="401, the API key is missing or wrong; give the"):
            opened(url)
