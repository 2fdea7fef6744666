"""Between the server and an API: its routes, the reader of bodies and the writer of responses."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from edgeinfer.model import Model
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.response_format import ResponseFormat
from edgeinfer.serving.models.models import Models
from edgeinfer.serving.text_steps import TextSteps

Reader = Callable[[Mapping[str, Any]], CompletionRequest]
Writer = Callable[[Model, CompletionRequest], ResponseFormat]


@dataclass(frozen=True)
class CompletionRoute:
    """A path that completes prompts: the reader of its bodies and the writer of its responses."""

    path: str
    read: Reader
    write: Writer


class TextsRequest(Protocol):
    """A request about texts without a completion."""

    @property
    def model(self) -> str: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TextsRoute:
    """A path that embeds or ranks texts: the reader of its bodies, and what returns the response's body."""

    path: str
    read: Callable[[Mapping[str, Any]], TextsRequest]
    reply: Callable[[TextSteps, Any], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class PlainRoute:
    """Another path. `handle`: (request, server) -> response. `is_open`: it needs no key; `is_logged`: its
    requests have lines in the log.
    """

    path: str
    handle: "Callable[[Request, Server], Awaitable[Response]]"
    methods: Sequence[str] = ("GET",)
    is_open: bool = False
    is_logged: bool = True


AnyRoute = CompletionRoute | TextsRoute | PlainRoute


class Server(Protocol):
    """What the routes of an API use of the server."""

    models: Models
    started: int
    """Seconds since the epoch."""

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        ...

    def metrics(self) -> tuple[bytes, str]:
        """All metrics, and their media type."""
        ...

    async def body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request. Raises `RequestError`."""
        ...

    async def prompt_tokens(self, parsed: CompletionRequest, write: Writer) -> int:
        """The number of tokens of a request's prompt, without a completion."""
        ...
