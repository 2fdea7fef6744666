"""Request fields: supported, known without effect, refused, and unknown."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.errors import shortened, shown
from edgeinfer.options import RunOptions, SamplingParams
from edgeinfer.options.option_field import options_of

MAX_FIELDS = 100

SAMPLING = tuple(
    name for kind in (SamplingParams, RunOptions) for name, info in options_of(kind).items() if info.server
)
"""Fields with the library's names, including additions of llama.cpp and Ollama."""
_ELSEWHERE = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_output_tokens": "max_tokens",
    "repetition_penalty": "repeat_penalty",
    "input": "messages or prompt",
    "texts": "documents",
    "top_k": "top_n",
    "json_schema": "response_format",
    "format": "response_format",
    "guided_json": "response_format",
    "guided_grammar": "grammar",
}
"""Names of the same option in other programs."""


@dataclass(frozen=True)
class KnownFields:
    """The fields of one request body. `refused`: unsupported ones that would change the completion, with the
    reason; `neutral`: their accepted values, which match the default behavior; `without_effect`: those that
    don't change the completion.
    """

    supported: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    neutral: Mapping[str, Any] = field(default_factory=dict)


class RequestError(Exception):
    """A refused request: the HTTP status and OpenAI's error object."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def check_fields(body: Mapping[str, Any], fields: KnownFields) -> list[str]:
    """Warnings about fields without an effect. Raises `RequestError` for unknown and refused ones."""
    if len(body) > MAX_FIELDS:
        raise RequestError(f"the body: saw {len(body)} fields, wanted {MAX_FIELDS} at most")
    warnings = []
    for name, value in body.items():
        if name in fields.supported:
            continue
        if name in fields.refused:
            if not _is_neutral(value, fields.neutral.get(name, ())):
                raise RequestError(f"{name}: {fields.refused[name]}", param=name)
        elif name not in fields.without_effect:
            raise _unknown(name, fields.supported)
        elif value is not None:
            warnings.append(f"{name}: has no effect here")
    return warnings


def check_inner_fields(
    values: Mapping[str, Any], where: str, known: Collection[str], without_effect: Collection[str] = ()
) -> list[str]:
    """As `check_fields`, for an object inside the body, named by `where`."""
    if len(values) > MAX_FIELDS:
        raise RequestError(f"{where}: saw {len(values)} fields, wanted {MAX_FIELDS} at most", param=where)
    warnings = []
    for name, value in values.items():
        if name in without_effect:
            if value not in (None, [], {}, ""):
                warnings.append(f"{where}.{name}: has no effect here")
        elif name not in known:
            raise _unknown(name, known, f"{where}.")
    return warnings


def _is_neutral(value: Any, accepted: Any) -> bool:
    return value is None or value is False or value in ([], {}, "") or value == accepted


def _unknown(name: str, known: Collection[str], where: str = "") -> RequestError:
    short = where + shortened(name)
    near = _ELSEWHERE.get(name)
    if near is None and name == "num_ctx":
        hint = "the context is set when the server starts (--context)"
    elif near is not None and (near in known or " " in near):
        hint = f"did you mean {near}?"
    else:
        hint = f"did you mean {difflib.get_close_matches(name[:40], sorted(known), n=1, cutoff=0)[0]}?"
    return RequestError(f"{short}: no such field; {hint}", param=short)


def checked_bool(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    """A boolean; False if it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{where}{name}: saw {shown(value)}, wanted true or false", param=name)
    return bool(value)


def checked_count(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """An integer from `low` to `high`; `default` if it is missing."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}: saw {shown(value)}, wanted {low} to {high}", param=name)
    return value


def checked_text(body: Mapping[str, Any], name: str) -> str:
    """A text; empty if it is missing."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name}: saw {shown(value)}, wanted a text", param=name)
    return value or ""


def checked_list(value: Any, name: str, max_items: int, expected: str) -> list[Any]:
    """A list of at most `max_items` values; empty if it is missing."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{name}: saw {shown(value)}, wanted {expected}", param=name)
    if len(value) > max_items:
        raise RequestError(f"{name}: saw {len(value)}, wanted {max_items} at most", param=name)
    return value
