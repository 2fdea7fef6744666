"""Validates request bodies and converts OpenAI's fields to the model's settings."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.chat_templates.template_options import Thinking
from edgeinfer.chat_templates.tool_calls import check_tools
from edgeinfer.errors import shown
from edgeinfer.serving import fields
from edgeinfer.serving.fields import (
    RequestError,
    check_fields,
    check_inner_fields,
    checked_bool,
    checked_count,
    checked_list,
    checked_text,
)
from edgeinfer.serving.messages import checked_messages
from edgeinfer.serving.reasoning import template_settings

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_COMPLETIONS = 64
"""Maximum completions of one request: prompts times `n`."""
MAX_TEXTS = 2048
MAX_LOGPROBS = 20
MAX_TOOLS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000
MAX_BIASES = 1024
MAX_BREAKERS = 64


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt (a text, ids or messages), the keywords of `Model.stream`, and the response format."""

    model: str
    prompts: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    count: int = 1
    streamed: bool = False
    usage_at_end: bool = False
    echo: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts to embed; `as_base64`: encoding of the vectors."""

    model: str
    texts: tuple[str, ...]
    as_base64: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RerankRequest:
    """Texts to rank for a query. `count`: the number of results; `with_texts`: results contain the texts."""

    model: str
    query: str
    texts: tuple[str, ...]
    count: int
    with_texts: bool
    warnings: tuple[str, ...] = ()


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body isn't JSON: {' '.join(str(error).split())[:120]}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body: saw {type(body).__name__}, wanted a JSON object")
    if b"\\ud" in raw.lower():
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body: saw half a surrogate pair, wanted whole characters") from None
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"saw {name}, which JSON doesn't have")


def chat_request(body: Mapping[str, Any], levels: Sequence[Thinking] = ()) -> CompletionRequest:
    """POST /v1/chat/completions. `levels`: reasoning levels of the model's chat template."""
    warnings = check_fields(body, fields.CHAT)
    messages, more = checked_messages(body.get("messages"))
    settings, settings_warnings = _settings(body)
    of_template, template_warnings = template_settings(body, levels)
    settings |= of_template
    top = checked_count(body, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if checked_bool(body, "logprobs"):
        settings["logprobs"] = top
    elif top:
        raise RequestError("top_logprobs: needs logprobs true", param="top_logprobs")
    return CompletionRequest(
        prompts=(messages,),
        settings=settings,
        tools=_tools(body),
        warnings=(*warnings, *more, *settings_warnings, *template_warnings),
        **_common(body),
    )


def text_request(body: Mapping[str, Any]) -> CompletionRequest:
    """POST /v1/completions."""
    warnings = check_fields(body, fields.TEXT)
    prompts = _prompts(body.get("prompt", ""))
    settings, settings_warnings = _settings(body)
    settings.setdefault("max_tokens", 16)
    echo = checked_bool(body, "echo")
    if body.get("logprobs") is not None:
        if echo:
            raise RequestError(
                "echo: log probabilities of a prompt aren't supported; leave out echo or logprobs"
            )
        settings["logprobs"] = checked_count(body, "logprobs", 0, 0, MAX_LOGPROBS)
    common = _common(body)
    if len(prompts) * common["count"] > MAX_COMPLETIONS:
        saw = f"{len(prompts)} prompts with n {common['count']}"
        raise RequestError(f"prompt: saw {saw}, wanted {MAX_COMPLETIONS} completions at most", param="prompt")
    return CompletionRequest(
        prompts=prompts, settings=settings, echo=echo, warnings=(*warnings, *settings_warnings), **common
    )


def _prompts(prompt: Any) -> tuple[Any, ...]:
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(checked_list(prompt, "prompt", MAX_PROMPTS, "texts")) if several else (prompt,)
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(i) is int for i in each)):
            raise RequestError(f"prompt: saw {shown(each)}, wanted a text or token ids", param="prompt")
    return prompts


def embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """POST /v1/embeddings."""
    warnings = check_fields(body, fields.EMBEDDING)
    given = body.get("input")
    texts = [given] if isinstance(given, str) else checked_list(given, "input", MAX_TEXTS, "texts")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("input: wanted a text, or a list of texts", param="input")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64", None):
        raise RequestError(
            f"encoding_format: saw {shown(encoding)}, wanted float or base64", param="encoding_format"
        )
    return EmbeddingRequest(checked_text(body, "model"), tuple(texts), encoding == "base64", tuple(warnings))


def rerank_request(body: Mapping[str, Any]) -> RerankRequest:
    """POST /v1/rerank: the fields of Jina and Cohere."""
    warnings = check_fields(body, fields.RERANK)
    query = checked_text(body, "query")
    if not query:
        raise RequestError("query: wanted a text", param="query")
    given = checked_list(body.get("documents"), "documents", MAX_TEXTS, "texts")
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in given]
    plain = tuple(text for text in texts if isinstance(text, str))
    if not plain or len(plain) != len(texts):
        raise RequestError("documents: wanted a list of texts", param="documents")
    count = checked_count(body, "top_n", len(plain), 1, 1 << 31)
    with_texts = checked_bool(body, "return_documents")
    return RerankRequest(checked_text(body, "model"), query, plain, count, with_texts, tuple(warnings))


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    streamed = checked_bool(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, Mapping):
            raise RequestError(
                f"stream_options: saw {shown(options)}, wanted an object", param="stream_options"
            )
        if not streamed:
            raise RequestError("stream_options: needs stream true", param="stream_options")
        check_inner_fields(options, "stream_options", ("include_usage",))
    return {
        "model": checked_text(body, "model"),
        "count": checked_count(body, "n", 1, 1, MAX_CHOICES),
        "streamed": streamed,
        "usage_at_end": checked_bool(options or {}, "include_usage", "stream_options."),
    }


def _settings(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sampling parameters and limits, with warnings; the model itself refuses values out of range."""
    settings = {name: body[name] for name in fields.SAMPLING if body.get(name) is not None}
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    if any(value is not None for value in limits):
        settings["max_tokens"] = limits[1] if limits[0] is None else limits[0]
    if isinstance(settings.get("stop"), list):
        for text in checked_list(settings["stop"], "stop", MAX_STOPS, "texts"):
            if isinstance(text, str) and len(text) > MAX_STOP_LENGTH:
                raise RequestError(f"stop: saw {len(text)} characters, wanted {MAX_STOP_LENGTH} at most")
    if "dry_sequence_breakers" in settings:
        breakers = checked_list(
            settings["dry_sequence_breakers"], "dry_sequence_breakers", MAX_BREAKERS, "a list of texts"
        )
        settings["dry_sequence_breakers"] = tuple(breakers)
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    schema, warnings = _schema(body.get("response_format"))
    return settings | schema, warnings


def _biases(biases: Any) -> dict[int, float]:
    try:
        if len(biases) > MAX_BIASES:
            raise RequestError(
                f"logit_bias: saw {len(biases)}, wanted {MAX_BIASES} at most", param="logit_bias"
            )
        values = {int(token): float(bias) for token, bias in biases.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise RequestError("logit_bias: wanted token ids with numbers", param="logit_bias") from None
    if not all(map(math.isfinite, values.values())):
        raise RequestError("logit_bias: wanted finite numbers", param="logit_bias")
    return values


def _schema(response_format: Any) -> tuple[dict[str, Any], list[str]]:
    """`response_format` as a schema, with warnings."""
    name = "response_format"
    if response_format is None:
        return {}, []
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind in ("text", "json_object"):
        check_inner_fields(response_format, name, ("type",))
        return {} if kind == "text" else {"schema": {"type": "object"}}, []
    inner = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if kind == "json_schema" and isinstance(inner, Mapping) and inner.get("schema") is not None:
        check_inner_fields(response_format, name, ("type", "json_schema"))
        known = ("name", "strict", "schema")
        warnings = check_inner_fields(inner, f"{name}.json_schema", known, ("description",))
        if inner.get("strict") is False:
            warnings.append(f"{name}.json_schema.strict: the schema is always enforced")
        return {"schema": inner["schema"]}, warnings
    raise RequestError(
        f"{name}: saw {shown(response_format)}, wanted text, json_object, or json_schema with a schema",
        param=name,
    )


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = checked_list(body.get("tools"), "tools", MAX_TOOLS, "a list of functions")
    check_tools(tools)
    tool_choice = body.get("tool_choice")
    if tool_choice is not None and tool_choice not in ("auto", "none"):
        raise RequestError("tool_choice: auto and none are supported here", param="tool_choice")
    return () if tool_choice == "none" else tuple(tools)


def prompts_of(parsed: CompletionRequest) -> Sequence[tuple[int, Any]]:
    """Index and prompt of each completion: `count` completions of the first prompt, then of the next."""
    return list(enumerate(prompt for prompt in parsed.prompts for _ in range(parsed.count)))
