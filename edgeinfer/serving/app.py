"""The HTTP application: routes, access checks, and error responses."""

import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError, shortened, shown
from edgeinfer.generation.async_stream import AsyncTokenStream
from edgeinfer.generation.completion_cache import CompletionCache, StoredStream
from edgeinfer.model import Model
from edgeinfer.options import LoadOptions
from edgeinfer.options.option_names import with_flags
from edgeinfer.ranking import RankedText
from edgeinfer.results import Generation
from edgeinfer.serving import replies
from edgeinfer.serving.access import LOCAL_HOSTS, Access
from edgeinfer.serving.bodies import Workers, largest_body, read_body, unless_disconnected
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.queue import RequestQueue
from edgeinfer.serving.replies import failure
from edgeinfer.serving.requests import (
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    body_of,
    chat_request,
    embedding_request,
    prompts_of,
    rerank_request,
    text_request,
)
from edgeinfer.serving.response_formats import ChatResponses, ResponseFormat, TextResponses

CLIENT_LEFT = 499
"""HTTP status that is logged when a client disconnects."""
MAX_WARNINGS = 20
TEXTS_PER_STEP = 16
"""Texts of a request that an encoder processes before a disconnected client is detected."""
RERANK_PATHS = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")
Parsed = TypeVar("Parsed")
TextsRequest = TypeVar("TextsRequest", EmbeddingRequest, RerankRequest)


@dataclass(frozen=True)
class ServerOptions:
    """Access and queue limits. `hosts`: names by which requests may call this machine. `response_cache`:
    number of completions that are kept for repeated requests.
    """

    key: str | None = None
    max_waiting: int = 64
    hosts: Sequence[str] = LOCAL_HOSTS
    response_cache: int = 0

    def __post_init__(self) -> None:
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise SettingError("key: wanted printable ASCII characters, at least one")


def serving_app(model: Model, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application; the caller closes the model."""
    return _Server(model, options or ServerOptions()).app()


class _Server:
    def __init__(self, model: Model, options: ServerOptions) -> None:
        self._model = model
        self._key = options.key
        self._hosts = list(options.hosts)
        self._queue = RequestQueue(options.max_waiting, model.parallel)
        self._workers = Workers()
        self._cache = CompletionCache(options.response_cache, model.sampling)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """The Starlette application. Web pages can't reach it by other names of this machine."""
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._one_model)),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._text), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self._embed), methods=["POST"]),
            *(Route(path, self._guarded(self._rerank), methods=["POST"]) for path in RERANK_PATHS),
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(Access, hosts=self._hosts)],
            exception_handlers={HTTPException: _not_found, Exception: _internal_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self._workers.close()

    def _guarded(
        self, completion: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check the key, and turn exceptions into error objects."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await completion(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except RequestError as error:
                return failure(str(error), error.status, error.param, error.code)
            except ContextOverflowError as error:
                return failure(_text(error), 400, "messages", "context_length_exceeded")
            except EdgeInferError as error:
                return failure(_text(error), 400)

        return guarded

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _health(self, _: Request) -> Response:
        queue = self._queue
        return JSONResponse({"status": "ok", "waiting": queue.waiting, "running": queue.running})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "edgeinfer",
            "context": self._model.context,
            "parallel": self._model.parallel,
            "cache_bytes": self._model.plan.cache_bytes if self._model.plan else None,
        }

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise RequestError(
                f"model {shown(name)} isn't here; this server has {self._model.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _chat(self, request: Request) -> Response:
        def parse(body: dict[str, Any]) -> CompletionRequest:
            return chat_request(body, self._model.thinking_levels)

        return await self._completions(request, parse, ChatResponses)

    async def _text(self, request: Request) -> Response:
        return await self._completions(request, text_request, TextResponses)

    async def _completions(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], CompletionRequest],
        format_for: Callable[[Model, CompletionRequest], ResponseFormat],
    ) -> Response:
        self._queue.admit()
        response: Response | None = None
        try:
            parsed = await self._parsed(request, parse)
            self._check_model(parsed.model)
            responses = format_for(self._model, parsed)
            if parsed.streamed:
                response = await self._streamed(request, responses)
            else:
                response = await unless_disconnected(request, self._whole(responses))
            return response or Response(status_code=CLIENT_LEFT)
        finally:
            if not isinstance(response, EventStream):
                self._queue.leave()

    async def _parsed(self, request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """Parse a request on another thread."""
        raw = await read_body(request, largest_body(self._model.context))
        return await self._workers.run(lambda: parse(body_of(raw)))

    async def _start(self, responses: ResponseFormat, prompt: Any) -> AsyncTokenStream | StoredStream:
        """Start a completion, unless it is stored; tokenization and grammar compilation run on another
        thread.
        """
        if (stored := self._cache.get(self._cache.key(prompt, responses.settings))) is not None:
            return StoredStream(stored)
        return await self._workers.run(lambda: self._model.stream_async(prompt, **responses.settings))

    def _ended(self, responses: ResponseFormat, prompt: Any, completion: Generation) -> Generation:
        """The completion, which is stored."""
        self._cache.put(self._cache.key(prompt, responses.settings), completion)
        return completion

    async def _whole(self, responses: ResponseFormat) -> Response:
        """All completions in one object."""
        prompts = prompts_of(responses.parsed)
        started = await self._start(responses, prompts[0][1])  # report its errors before waiting in the queue
        completions = []
        async with self._queue.slot():
            for index, prompt in prompts:
                stream = started if index == 0 else await self._start(responses, prompt)
                async with aclosing(stream):
                    async for _ in stream:
                        pass
                completions.append(self._ended(responses, prompt, stream.result))
        return JSONResponse(
            {
                **responses.head(streamed=False),
                "choices": [
                    responses.choice(index, completion) for index, completion in enumerate(completions)
                ],
                "usage": replies.usage(completions),
                "timings": replies.timings(completions[-1]),
                **_warnings(responses.parsed.warnings),
            }
        )

    async def _streamed(self, request: Request, responses: ResponseFormat) -> Response | None:
        """Wait for the first token: until then a failure has its own HTTP status."""
        events = self._events(responses)
        try:
            first = await unless_disconnected(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        if first is None:
            await events.aclose()
            return None
        return EventStream(first, events, self._queue.leave)

    async def _events(self, responses: ResponseFormat) -> AsyncGenerator[bytes, None]:
        """Server-sent events of every completion; a client that disconnects ends generation."""
        head, completions = responses.head(streamed=True), []
        extra = _warnings(responses.parsed.warnings)
        prompts = prompts_of(responses.parsed)
        started = await self._start(responses, prompts[0][1])
        async with self._queue.slot():
            for index, prompt in prompts:
                stream = started if index == 0 else await self._start(responses, prompt)
                async with aclosing(stream):
                    opened = False
                    async for token in stream:
                        first = [] if opened else responses.first_chunks(index, stream.result)
                        opened = True
                        for chunk in [*first, *responses.chunks(index, token)]:
                            yield replies.event({**head, "choices": [chunk], **extra})
                            extra = {}
                completions.append(self._ended(responses, prompt, stream.result))
                for chunk in responses.last_chunks(index, stream.result):
                    yield replies.event({**head, "choices": [chunk], **extra})
                    extra = {}
        if responses.parsed.usage_at_end:
            yield replies.event({**head, "choices": [], "usage": replies.usage(completions)})
        yield replies.event("[DONE]")

    async def _embed(self, request: Request) -> Response:
        return await self._of_texts(request, embedding_request, self._embedded)

    async def _rerank(self, request: Request) -> Response:
        return await self._of_texts(request, rerank_request, self._ranked)

    async def _of_texts(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], TextsRequest],
        work: Callable[[TextsRequest], Awaitable[Response]],
    ) -> Response:
        """The response of `work` on the texts of a request."""
        self._queue.admit()
        try:
            parsed = await self._parsed(request, parse)
            self._check_model(parsed.model)
            response = await unless_disconnected(request, work(parsed))
            return response or Response(status_code=CLIENT_LEFT)
        finally:
            self._queue.leave()

    async def _embedded(self, parsed: EmbeddingRequest) -> Response:
        """The embeddings; a disconnected client is detected between two steps."""
        async with self._queue.slot():
            rows = [
                await self._workers.run(partial(self._model.text_vectors, texts))
                for _, texts in self._steps(parsed.texts)
            ]
        vectors = np.concatenate([each.vectors for each in rows])
        tokens = sum(each.tokens for each in rows)
        reply = replies.embeddings(self._model.name, vectors, tokens, parsed.as_base64)
        return JSONResponse({**reply, **_warnings(parsed.warnings)})

    def _steps(self, texts: Sequence[str]) -> list[tuple[int, Sequence[str]]]:
        """The texts of each step, with the index of the first."""
        count = TEXTS_PER_STEP if self._model.is_encoder else 1
        return [(first, texts[first : first + count]) for first in range(0, len(texts), count)]

    async def _ranked(self, parsed: RerankRequest) -> Response:
        """The texts by relevance; a disconnected client is detected between two steps."""
        scored: list[RankedText] = []
        tokens = 0
        async with self._queue.slot():
            for first, texts in self._steps(parsed.texts):
                ranking = await self._workers.run(partial(self._model.ranking, parsed.query, texts))
                scored += [replace(each, index=first + each.index) for each in ranking.texts]
                tokens += ranking.tokens
        scored.sort(key=lambda each: (-each.score, each.index))
        reply = replies.ranking(self._model.name, scored[: parsed.count], tokens, parsed.with_texts)
        return JSONResponse({**reply, **_warnings(parsed.warnings)})


class EventStream(StreamingResponse):
    """A response of server-sent events; `on_end` is called once, even if it was never sent."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(
            self._all(first, events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; stops if the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_end()

    @staticmethod
    async def _all(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        yield first
        try:
            async for event in events:
                yield event
        except EdgeInferError as error:
            yield replies.event(replies.error(_text(error), "server_error"))


def _text(error: EdgeInferError) -> str:
    """The text of an error; options of the server's start are named by their flags."""
    return with_flags(str(error), (LoadOptions,))


def _warnings(warnings: Sequence[str]) -> dict[str, list[str]]:
    """Warnings about fields without an effect, for the response; empty if there are none."""
    return {"warnings": list(warnings[:MAX_WARNINGS])} if warnings else {}


async def _not_found(request: Request, error: Exception) -> Response:
    """Unknown path or method."""
    assert isinstance(error, HTTPException)
    route = f"{request.method} {shortened(request.url.path)}"
    return failure(f"{route}: {error.detail}", error.status_code)


async def _internal_error(request: Request, error: Exception) -> Response:
    """An internal error; the traceback is logged."""
    return failure(f"unexpected {type(error).__name__}: a bug in edgeinfer", 500)
