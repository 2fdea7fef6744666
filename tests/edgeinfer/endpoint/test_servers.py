"""Options as the fields of other servers' requests."""

from typing import Any

import pytest

from edgeinfer.endpoint.servers import KINDS, UNKNOWN, kind_of, request_fields
from edgeinfer.errors import SettingError
from edgeinfer.options import LoadOptions


@pytest.mark.parametrize(
    ("owner", "given", "fields"),
    [
        ("vllm", {"repeat_penalty": 1.1, "top_k": 5}, {"repetition_penalty": 1.1, "top_k": 5}),
        ("edgeinfer", {"repeat_penalty": 1.1, "dry_base": 2.0}, {"repeat_penalty": 1.1, "dry_base": 2.0}),
        ("edgeinfer", {"context_overflow": "shift"}, {"context_overflow": "shift"}),
        ("llamacpp", {"mirostat": 2}, {"mirostat": 2}),
        ("openai", {"max_tokens": 5}, {"max_completion_tokens": 5}),
        ("vllm", {"grammar": "root"}, {"structured_outputs": {"grammar": "root"}}),
        ("edgeinfer", {"grammar": "root"}, {"grammar": "root"}),
        ("vllm", {"thinking": "off"}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("vllm", {"thinking": "low"}, {"reasoning_effort": "low"}),
        ("edgeinfer", {"thinking": "off"}, {"reasoning_effort": "none"}),
        ("edgeinfer", {"thinking": "on"}, {"reasoning_effort": "on"}),
        ("", {"template_args": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        ("", {"stop": "x", "seed": 0, "temperature": 0.0}, {"stop": ["x"], "seed": 0, "temperature": 0.0}),
        ("", {"max_tokens": None, "raw": False, "progress": None, "tools": ()}, {}),
        ("", {"tools": [{"name": "f"}]}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
def test_options_have_the_names_of_the_server(
    owner: str, given: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert request_fields(given, kind_of(owner)) == fields


def test_a_schema_is_a_response_format() -> None:
    fields = request_fields({"schema": '{"type": "object"}'}, UNKNOWN)
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    with pytest.raises(SettingError, match=r"schema: saw '{', wanted a JSON schema"):
        request_fields({"schema": "{"}, UNKNOWN)


@pytest.mark.parametrize(
    ("owner", "given", "message"),
    [
        ("openai", {"top_k": 5}, "top_k: OpenAI doesn't have it; leave it out, or the engine"),
        ("vllm", {"mirostat": 2}, "mirostat: vLLM doesn't have it"),
        ("openai", {"grammar": "x"}, "grammar: OpenAI doesn't have it"),
        ("vllm", {"beams": 2}, "beams: OpenAI's API has no beam search"),
        ("vllm", {"logprobs": 2}, "logprobs: token ids aren't part of OpenAI's API"),
        ("vllm", {"context_overflow": "shift"}, "context_overflow: vLLM doesn't have it"),
        ("vllm", {"temperature": -1.0}, "temperature: saw -1.0, wanted a number of at least 0"),
    ],
)
def test_what_a_server_lacks_is_refused(owner: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as failure:
        request_fields(given, KINDS[owner])
    assert str(failure.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"threads": 2}, "threads: the server of the engine 'openai' decides it"),
        ({"vram": "8GiB"}, "vram: the server of the engine 'openai' decides it"),
        ({"lora": "x.gguf"}, "lora: the server of the engine 'openai' decides it"),
    ],
)
def test_options_of_this_machine_are_not_for_a_server(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LoadOptions.from_keywords({"engine": "openai", "base_url": "http://x", **given})


def test_an_address_needs_the_engine() -> None:
    with pytest.raises(SettingError, match="base_url: only the engine 'openai' has a server"):
        LoadOptions(base_url="http://x")
