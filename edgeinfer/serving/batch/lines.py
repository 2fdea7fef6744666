"""The lines of a batch file: requests with an id, a path and a body; a bad line becomes an error."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import SettingError, shown

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/messages",
)
_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchLine:
    """A line. `id`: from its number and its text, so that a later run recognizes it; `error`: why it is no
    request, "" if it is one.
    """

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    model: str = ""
    error: str = ""


def read_lines(path: Path) -> list[BatchLine]:
    """The lines of a file that aren't blank; requests of one model follow each other, so that each model is
    loaded once.

    Raises:
        SettingError: there is none.
        OSError: the file can't be read.
    """
    lines: list[BatchLine] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                lines.append(_line(number, raw.strip(), seen))
    if not lines:
        raise SettingError(f"{path}: saw no lines, wanted one request in JSON on each")
    return _by_model(lines)


def _by_model(lines: Sequence[BatchLine]) -> list[BatchLine]:
    order: dict[str, int] = {}
    for line in lines:
        order.setdefault(line.model, len(order))
    return sorted(lines, key=lambda line: order[line.model])


def _line(number: int, raw: bytes, seen: set[str]) -> BatchLine:
    line_id = f"batch_req_{number}_{hashlib.sha256(raw).hexdigest()[:16]}"
    custom_id = None
    try:
        value = json.loads(raw)
        custom_id = _custom_id(value)
        url, body = _request(value)
    except (ValueError, RecursionError) as error:
        message = str(error) if isinstance(error, _BadLineError) else "not JSON, wanted an object"
        return BatchLine(line_id, custom_id, error=f"line {number}: {message}")
    if custom_id in seen:
        return BatchLine(
            line_id, custom_id, error=f"line {number}: custom_id: {shown(custom_id)} is used before"
        )
    seen.add(str(custom_id))
    model = body.get("model")
    text = json.dumps(body).encode()
    return BatchLine(line_id, custom_id, url, text, model if isinstance(model, str) else "")


class _BadLineError(ValueError):
    """A line that is no request."""


def _custom_id(value: Any) -> str:
    if not isinstance(value, dict):
        raise _BadLineError(f"saw {shown(value)}, wanted an object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise _BadLineError(f"custom_id: saw {shown(custom_id)}, wanted a text")
    return custom_id


def _request(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the body."""
    for name in value:
        if name not in _FIELDS:
            raise _BadLineError(f"{shown(name)}: no such field; wanted {', '.join(_FIELDS)}")
    method, url, body = value.get("method", "POST"), value.get("url"), value.get("body")
    if method != "POST":
        raise _BadLineError(f"method: saw {shown(method)}, wanted POST")
    if url not in URLS:
        raise _BadLineError(f"url: saw {shown(url)}, wanted one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise _BadLineError(f"body: saw {shown(body)}, wanted an object")
    if body.get("stream"):
        raise _BadLineError("body.stream: a batch can't stream; leave it out")
    return str(url), body
