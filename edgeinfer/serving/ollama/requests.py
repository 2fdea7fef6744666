"""Reads the bodies of /api/chat, /api/generate and /api/embed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.options.option_field import MAX_WHOLE
from edgeinfer.serving.completion.requests import CompletionRequest, sampling_settings
from edgeinfer.serving.completion.tool_choice import tool_use
from edgeinfer.serving.fields import (
    SAMPLING,
    KnownFields,
    RequestError,
    check_fields,
    check_inner_fields,
    checked_bool,
    checked_count,
    checked_list,
    checked_text,
)
from edgeinfer.serving.models.keep_alive import keep_alive_of
from edgeinfer.serving.openai.messages import MAX_MESSAGES, checked_messages
from edgeinfer.serving.openai.requests import MAX_LOGPROBS
from edgeinfer.serving.openai.texts import MAX_TEXTS

_COMMON = ("model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs")
_IGNORED = frozenset(("truncate", "shift", "context"))
CHAT = KnownFields(frozenset((*_COMMON, "messages", "tools")), without_effect=_IGNORED)
GENERATE = KnownFields(
    frozenset((*_COMMON, "prompt", "system", "raw")),
    {
        **dict.fromkeys(("suffix", "width", "height", "steps"), "not supported here"),
        "images": "not supported here; only text is",
        "template": "not supported here; --chat-template FILE sets it when the server starts",
    },
    _IGNORED,
)
EMBED = KnownFields(
    frozenset(("model", "input", "prompt", "keep_alive")),
    {"dimensions": "vectors have the model's hidden size"},
    frozenset(("truncate", "options")),
)
_OPTIONS_ELSEWHERE = (
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "use_mmap"),
    *("use_mlock", "low_vram", "vocab_only", "f16_kv", "penalize_newline", "tfs_z", "draft_num_predict"),
    *("logits_all", "embedding_only"),
)
"""Options that are set when the server starts, or that have no effect."""
_THINK: dict[Any, str] = {True: "on", False: "none"}


@dataclass(frozen=True)
class OllamaRequest(CompletionRequest):
    """A request of /api/chat or /api/generate. `began`: when it was read, on the clock `perf_counter`."""

    is_chat: bool = True
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class OllamaEmbedding:
    """Texts to embed. `is_single`: the older path, whose response has one vector."""

    model: str
    texts: tuple[str, ...]
    is_single: bool = False
    warnings: tuple[str, ...] = ()
    began: float = field(default_factory=time.perf_counter)


def model_name(body: Mapping[str, Any]) -> str:
    """The requested model, without Ollama's tag of the newest one."""
    return checked_text(body, "model" if "model" in body else "name").removesuffix(":latest")


def chat_request(body: Mapping[str, Any]) -> OllamaRequest:
    """POST /api/chat."""
    warnings = check_fields(body, CHAT)
    given = checked_list(body.get("messages"), "messages", MAX_MESSAGES, "a list of messages")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    prompts = (checked_messages(messages)[0],) if messages else ()
    return OllamaRequest(
        prompts=prompts, tool_use=tool_use(body.get("tools"), None, None), **_common(body, warnings)
    )


def generate_request(body: Mapping[str, Any]) -> OllamaRequest:
    """POST /api/generate."""
    warnings = check_fields(body, GENERATE)
    prompt, system = checked_text(body, "prompt"), checked_text(body, "system")
    common = _common(body, warnings)
    if checked_bool(body, "raw"):
        return OllamaRequest(prompts=(prompt,) if prompt else (), is_chat=False, **common)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return OllamaRequest(prompts=(messages,) if prompt else (), is_chat=False, **common)


def embed_request(body: Mapping[str, Any]) -> OllamaEmbedding:
    """POST /api/embed."""
    warnings = check_fields(body, EMBED)
    given = body.get("input")
    texts = [given] if isinstance(given, str) else checked_list(given, "input", MAX_TEXTS, "texts")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("input: wanted a text, or a list of texts", param="input")
    return OllamaEmbedding(model_name(body), tuple(texts), warnings=tuple(warnings))


def one_embedding_request(body: Mapping[str, Any]) -> OllamaEmbedding:
    """POST /api/embeddings, the older path."""
    warnings = check_fields(body, EMBED)
    return OllamaEmbedding(model_name(body), (checked_text(body, "prompt"),), True, tuple(warnings))


def _common(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    settings = _options(body.get("options"), warnings) | _schema(body.get("format"))
    top = checked_count(body, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if checked_bool(body, "logprobs") or top:
        settings["logprobs"] = top
    think = body.get("think")
    if think is not None and not isinstance(think, bool | str):
        raise RequestError(
            f"think: saw {shown(think)}, wanted true, false, low, medium or high", param="think"
        )
    return {
        "model": model_name(body),
        "settings": settings,
        "effort": _THINK[think] if isinstance(think, bool) else think,
        "effort_field": "think",
        "streamed": body.get("stream") is None or checked_bool(body, "stream"),
        "keep_alive": keep_alive_of(body.get("keep_alive")),
        "warnings": tuple(warnings),
    }


def _options(options: Any, warnings: list[str]) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise RequestError(f"options: saw {shown(options)}, wanted an object", param="options")
    known = (*SAMPLING, "num_predict")
    warnings += check_inner_fields(options, "options", known, _OPTIONS_ELSEWHERE)
    settings = sampling_settings(options)
    limit = checked_count(options, "num_predict", -1, -2, MAX_WHOLE)
    if limit >= 0:  # -1: no limit, -2: until the context is full
        settings["max_tokens"] = limit
    return settings


def _schema(form: Any) -> dict[str, Any]:
    """`format` as a schema: "json", or a JSON schema."""
    if form in (None, ""):
        return {}
    if form == "json":
        return {"schema": {"type": "object"}}
    if not isinstance(form, Mapping):
        raise RequestError(f"format: saw {shown(form)}, wanted json or a JSON schema", param="format")
    return {"schema": dict(form)}


def _message(message: Any, where: str) -> Any:
    """A message in OpenAI's format."""
    if not isinstance(message, Mapping):
        return message
    if message.get("images"):
        raise RequestError(f"{where}.images: not supported here; only text is", param="messages")
    renamed = {"tool_name": "name"}
    values = {renamed.get(key, key): value for key, value in message.items() if key != "images"}
    return {key: value for key, value in values.items() if value is not None}
