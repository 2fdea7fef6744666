"""What a request's body asks for, checked: OpenAI's fields as the model's settings."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from edgeinfer.sampling import SamplerSettings

MOST_ANSWERS = 16
SAME = (*(one.name for one in fields(SamplerSettings) if one.name != "logit_bias"), "stop", "grammar")
"""Fields that the library knows by the same name, llama.cpp's and Ollama's additions among them."""
OTHERS = ("top_logprobs", "stop_token_ids")
"""Fields of clients that look like one of those and mean something else."""
NOT_HERE = ("functions", "function_call", "audio", "prediction", "suffix", "best_of", "web_search_options")
"""Fields that would change the answer, and that nothing here can do."""


class RequestError(Exception):
    """A request that is refused: the HTTP status, and what OpenAI's error object says."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Ask:
    """A prompt (a text, ids or messages) with the keywords of `Model.stream`, and how to reply."""

    model: str
    prompts: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    count: int = 1
    streamed: bool = False
    usage_at_end: bool = False
    echo: bool = False


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body isn't JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body: saw {type(found).__name__}, wanted a JSON object")
    return found


def chat_ask(body: Mapping[str, Any]) -> Ask:
    """POST /v1/chat/completions."""
    messages = _wanted(body, "messages", list)
    if not messages:
        raise RequestError("messages: saw none, wanted at least one", param="messages")
    settings = _settings(body)
    if body.get("logprobs"):
        settings["logprobs"] = _count(body, "top_logprobs", 0)
    return Ask(
        prompts=([_message(message, place) for place, message in enumerate(messages)],),
        settings=settings,
        tools=_tools(body),
        **_common(body),
    )


def text_ask(body: Mapping[str, Any]) -> Ask:
    """POST /v1/completions."""
    prompt = body.get("prompt", "")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(prompt) if several else (prompt,)
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(i) is int for i in each)):
            raise RequestError(f"prompt: saw {str(each)[:40]!r}, wanted a text or token ids", param="prompt")
    settings = _settings(body)
    settings.setdefault("max_tokens", 16)
    if body.get("logprobs") is not None:
        if body.get("echo"):
            raise RequestError("echo: a prompt's log probabilities aren't given here; leave out one of both")
        settings["logprobs"] = _count(body, "logprobs", 0)
    return Ask(prompts=prompts, settings=settings, echo=bool(body.get("echo")), **_common(body))


def embedding_ask(body: Mapping[str, Any]) -> tuple[str, list[str], bool]:
    """POST /v1/embeddings: the model, the texts, and whether vectors are wanted as base64."""
    given = body.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("input: wanted a text, or a list of texts", param="input")
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(f"encoding_format: saw {form!r}, wanted float or base64", param="encoding_format")
    if body.get("dimensions") is not None:
        raise RequestError("dimensions: vectors have the model's width here", param="dimensions")
    return str(body.get("model", "")), texts, form == "base64"


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    for name in NOT_HERE:
        if body.get(name):
            raise RequestError(f"{name}: not supported here", param=name)
    options = body.get("stream_options") or {}
    count = _count(body, "n", 1)
    if not 1 <= count <= MOST_ANSWERS:
        raise RequestError(f"n: saw {count}, wanted 1 to {MOST_ANSWERS}", param="n")
    return {
        "model": str(body.get("model", "")),
        "count": count,
        "streamed": bool(body.get("stream")),
        "usage_at_end": bool(options.get("include_usage")) if isinstance(options, Mapping) else False,
    }


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """The samplers and limits; the model itself refuses values that are out of their range."""
    for name in body:
        near = difflib.get_close_matches(name, SAME, n=1, cutoff=0.8)
        if near and name not in (*SAME, *OTHERS):
            raise RequestError(f"{name}: no such field; did you mean {near[0]}?", param=name)
    found = {name: body[name] for name in SAME if body.get(name) is not None}
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    if most is not None:
        found["max_tokens"] = most
    biases = body.get("logit_bias")
    if isinstance(breakers := found.get("dry_sequence_breakers"), list):
        found["dry_sequence_breakers"] = tuple(breakers)
    if biases:
        try:
            found["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        except (AttributeError, TypeError, ValueError):
            raise RequestError("logit_bias: wanted token ids with numbers", param="logit_bias") from None
    return found | _form(body.get("response_format"))


def _form(response_format: Any) -> dict[str, Any]:
    """`response_format` as a schema."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
    if kind in (None, "text"):
        return {}
    if kind == "json_object":
        return {"schema": {"type": "object"}}
    inner = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if kind == "json_schema" and isinstance(inner, Mapping) and "schema" in inner:
        return {"schema": inner["schema"]}
    raise RequestError(
        "response_format: wanted text, json_object, or json_schema with a schema", param="response_format"
    )


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return ()
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools: wanted a list of functions", param="tools")
    if choice != "auto":
        raise RequestError("tool_choice: auto and none are supported here", param="tool_choice")
    return tuple(tools)


def _message(message: Any, place: int) -> dict[str, Any]:
    """A message with its text in one piece."""
    name = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name}: wanted an object with a role", param="messages")
    found = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        found["content"] = "".join(_text_part(part, name) for part in content)
    elif content is None:
        found["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(f"{name}.content: wanted a text", param="messages")
    if found.get("tool_calls"):
        found["tool_calls"] = [_tool_call(call, name) for call in found["tool_calls"]]
    if found["role"] == "developer":
        found["role"] = "system"
    return found


def _text_part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"{name}.content: saw a part of type {kind!r}, only text is read here", param="messages"
    )


def _tool_call(call: Any, name: str) -> Any:
    """Templates want the arguments as an object; clients send them as a text."""
    try:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}
    except (KeyError, TypeError, ValueError):
        raise RequestError(
            f"{name}.tool_calls: wanted functions with JSON arguments", param="messages"
        ) from None


def _wanted(body: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(body.get(name), kind):
        raise RequestError(f"{name}: wanted {kind.__name__}, saw {type(body.get(name)).__name__}", param=name)
    return body[name]


def _count(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: saw {value!r}, wanted a number", param=name)
    return value


def prompts_of(ask: Ask) -> Sequence[tuple[int, Any]]:
    """Each answer's number and prompt: `count` answers to the first prompt, then to the next."""
    return list(enumerate(prompt for prompt in ask.prompts for _ in range(ask.count)))
