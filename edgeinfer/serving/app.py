"""The HTTP interface itself: which path does what, who may ask, and what a failure looks like."""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from edgeinfer.errors import ContextOverflowError, EdgeInferError
from edgeinfer.model import Model
from edgeinfer.serving import replies
from edgeinfer.serving.asks import RequestError, body_of, chat_ask, embedding_ask, prompts_of, text_ask
from edgeinfer.serving.forms import ChatForm, Form, TextForm
from edgeinfer.serving.turns import Turns

Found = TypeVar("Found")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]", "testserver")
MOST_BODY_BYTES = 64 << 20
CLIENT_LEFT = 499
"""What servers write into their logs for it."""


@dataclass(frozen=True)
class ServingWishes:
    """Who may ask, and how many may wait. `hosts`: names by which requests may call this machine."""

    key: str | None = None
    most_waiting: int = 64
    hosts: Sequence[str] = LOCAL_HOSTS


def serving_app(model: Model, wishes: ServingWishes | None = None) -> Starlette:
    """The application, for any ASGI server; the model stays the caller's to close."""
    return _Server(model, wishes or ServingWishes()).app()


class _Server:
    def __init__(self, model: Model, wishes: ServingWishes) -> None:
        self._model = model
        self._key = wishes.key
        self._hosts = list(wishes.hosts)
        self._turns = Turns(wishes.most_waiting)
        self._began = int(time.time())

    def app(self) -> Starlette:
        """Starlette's application. A page in a browser can't reach it by another name for this machine."""
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._text), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self._embed), methods=["POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=self._hosts, www_redirect=False)
        return Starlette(
            routes=routes,
            middleware=[hosts],
            exception_handlers={HTTPException: _nothing_there, Exception: _unforeseen},
        )

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The key is checked, and what goes wrong becomes an error object."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await answer(request)
            except RequestError as error:
                return _failure(str(error), error.status, error.param, error.code)
            except ContextOverflowError as error:
                return _failure(str(error), 400, "messages", "context_length_exceeded")
            except EdgeInferError as error:
                return _failure(str(error), 400)

        return guarded

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "waiting": self._turns.waiting})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._began,
            "owned_by": "edgeinfer",
            "context": self._model.context,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise RequestError(
                f"model {name!r} isn't here; this server has {self._model.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, ChatForm(self._model, chat_ask(await _body(request))))

    async def _text(self, request: Request) -> Response:
        return await self._complete(request, TextForm(self._model, text_ask(await _body(request))))

    async def _complete(self, request: Request, form: Form) -> Response:
        self._check_model(form.ask.model)
        if form.ask.streamed:
            return await self._streamed(request, form)
        whole = await _unless_gone(request, self._whole(form))
        return whole or Response(status_code=CLIENT_LEFT)

    async def _whole(self, form: Form) -> Response:
        """All answers in one object."""
        async with self._turns.turn():
            answers = [
                await self._model.generate_async(prompt, **form.settings)
                for _, prompt in prompts_of(form.ask)
            ]
        return JSONResponse(
            {
                **form.head(streamed=False),
                "choices": [form.choice(index, answer) for index, answer in enumerate(answers)],
                "usage": replies.usage(answers),
                "timings": replies.timings(answers[-1]),
            }
        )

    async def _streamed(self, request: Request, form: Form) -> Response:
        """The first token is waited for: until then a failure is a status of its own."""
        events = self._events(form)
        first = await _unless_gone(request, anext(events))
        if first is None:
            await events.aclose()
            return Response(status_code=CLIENT_LEFT)

        async def all_events() -> AsyncIterator[bytes]:
            async with aclosing(events):
                yield first
                try:
                    async for event in events:
                        yield event
                except EdgeInferError as error:
                    yield replies.event(replies.error(str(error), "server_error"))

        return StreamingResponse(
            all_events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def _events(self, form: Form) -> AsyncGenerator[bytes, None]:
        """Server-sent events of every answer; a reader who leaves ends the answer in progress."""
        head, answers = form.head(streamed=True), []
        async with self._turns.turn():
            for index, prompt in prompts_of(form.ask):
                stream = self._model.stream_async(prompt, **form.settings)
                async with aclosing(stream):
                    begun = False
                    async for token in stream:
                        first = [] if begun else form.first_pieces(index, stream.result)
                        begun = True
                        for piece in [*first, *form.pieces(index, token)]:
                            yield replies.event({**head, "choices": [piece]})
                answers.append(stream.result)
                for piece in form.last_pieces(index, stream.result):
                    yield replies.event({**head, "choices": [piece]})
        if form.ask.usage_at_end:
            yield replies.event({**head, "choices": [], "usage": replies.usage(answers)})
        yield replies.event("[DONE]")

    async def _embed(self, request: Request) -> Response:
        name, texts, as_base64 = embedding_ask(await _body(request))
        self._check_model(name)
        model = self._model
        async with self._turns.turn():
            found = await run_in_threadpool(model.text_vectors, texts)
        return JSONResponse(replies.embeddings(model.name, found.vectors, found.tokens, as_base64))


async def _body(request: Request) -> dict[str, Any]:
    """The request's JSON. Raises `RequestError`: too large, or none."""
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > MOST_BODY_BYTES:
            raise RequestError(f"the body has more than {MOST_BODY_BYTES >> 20} MiB", status=413)
    return body_of(bytes(raw))


async def _unless_gone(request: Request, answer: Awaitable[Found]) -> Found | None:
    """Wait for an answer; None if the client leaves: it is cancelled then."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _nothing_there(request: Request, error: Exception) -> Response:
    """No such path, or no such way to ask it."""
    assert isinstance(error, HTTPException)
    return _failure(f"{request.method} {request.url.path}: {error.detail}", error.status_code)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """A mistake of ours; whoever runs the server sees where."""
    return _failure(f"unexpected {type(error).__name__}: a bug in edgeinfer", 500)


def _failure(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(replies.error(message, kind, param, code), status_code=status)
