"""What an API's writer does: the body of a complete response, and the events of a streamed one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.requests import CompletionRequest

MAX_WARNINGS = 20
EVENT_STREAM = "text/event-stream"


class ResponseFormat(Protocol):
    """The differences between the APIs. A response has one or several completions, by index."""

    model: Model
    media_type: str
    """Of a stream."""

    @property
    def parsed(self) -> CompletionRequest: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of `Model.stream`."""
        ...

    def whole(self, completions: Sequence[Generation]) -> dict[str, Any]:
        """The body of a complete response."""
        ...

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        """Events before the first token of a completion, whose prompt has been read."""
        ...

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        """Events for a token, after those of `start`."""
        ...

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        """Events at the end of a completion."""
        ...

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        """Events at the end of the response."""
        ...

    def failed(self, message: str) -> Iterable[bytes]:
        """Events for a failure after the first token."""
        ...


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


def warnings_of(warnings: Sequence[str]) -> dict[str, list[str]]:
    """Warnings about fields without an effect, for the response; empty if there are none."""
    return {"warnings": list(warnings[:MAX_WARNINGS])} if warnings else {}
