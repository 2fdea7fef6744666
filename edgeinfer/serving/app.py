"""The HTTP application: routes, access checks, and the completion of a request."""

import asyncio
import hmac
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgeinfer.errors import (
    ContextOverflowError,
    DeviceError,
    EdgeInferError,
    KernelError,
    ModelFileError,
    OutOfMemoryError,
    SettingError,
    shortened,
)
from edgeinfer.generation.async_stream import AsyncTokenStream
from edgeinfer.generation.completion_cache import CompletionCache, StoredStream
from edgeinfer.model import Model
from edgeinfer.options.lora_option import LoraChoice
from edgeinfer.results import Generation
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, TextsRequest, TextsRoute, Writer
from edgeinfer.serving.completion.interleaving import interleaved
from edgeinfer.serving.completion.reasoning import with_reasoning
from edgeinfer.serving.completion.requests import CompletionRequest, body_of, prompts_of
from edgeinfer.serving.completion.response_format import ResponseFormat, warnings_of
from edgeinfer.serving.completion.truncation import truncated
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.models.models import Models, OneModel
from edgeinfer.serving.page.page import Page
from edgeinfer.serving.queue import RequestQueue
from edgeinfer.serving.routes import all_routes
from edgeinfer.serving.text_steps import TextSteps
from edgeinfer.serving.transport.access import LOCAL_HOSTS, Access
from edgeinfer.serving.transport.bodies import Workers, largest_body, read_body, unless_disconnected
from edgeinfer.serving.transport.event_stream import EventStream, completion_events
from edgeinfer.serving.transport.failures import failure, message_of
from edgeinfer.serving.transport.records import CLIENT_LEFT, RECORD, Metrics, Recorder, RequestRecord

Parsed = TypeVar("Parsed")
SERVER_ERRORS = (DeviceError, KernelError, ModelFileError)
"""Errors that no other request would avoid."""


def _no_log(line: str) -> None:
    pass


@dataclass(frozen=True)
class ServerOptions:
    """Access and queue limits. `hosts`: names by which requests may call this machine. `response_cache`:
    number of completions that are kept for repeated requests. `log`: called with a line for each request.
    `page` None: there is no chat page.
    """

    key: str | None = None
    max_waiting: int = 64
    hosts: Sequence[str] = LOCAL_HOSTS
    response_cache: int = 0
    log: Callable[[str], None] = _no_log
    page: Page | None = None

    def __post_init__(self) -> None:
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key.strip()):
            raise SettingError("key: wanted printable ASCII characters, at least one")


def serving_app(models: Model | Models, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application of a loaded model, which the caller closes, or of several models."""
    of = OneModel(models) if isinstance(models, Model) else models
    return _Server(of, options or ServerOptions()).app()


class _Server:
    def __init__(self, models: Models, options: ServerOptions) -> None:
        self.models = models
        self.started = int(time.time())
        self._options = options
        self._queue = RequestQueue(options.max_waiting, lambda: models.parallel)
        self._workers = Workers()
        self._caches: WeakKeyDictionary[Model, tuple[tuple[LoraChoice, ...], CompletionCache]] = (
            WeakKeyDictionary()
        )
        self._metrics = Metrics(lambda: self._queue.waiting, lambda: len(self.models.loaded))

    def app(self) -> Starlette:
        """The Starlette application. Web pages can't reach it by other names of this machine."""
        return Starlette(
            routes=[self._route(each) for each in all_routes(self._options.page)],
            middleware=[
                Middleware(Recorder, metrics=self._metrics, log=self._options.log),
                Middleware(Access, hosts=self._options.hosts),
            ],
            exception_handlers={HTTPException: _not_found, Exception: _internal_error},
            lifespan=self._lifespan,
        )

    def _route(self, route: AnyRoute) -> Route:
        handle: Callable[[Request], Awaitable[Response]]
        if isinstance(route, CompletionRoute):
            handle = partial(self._completions, route)
        elif isinstance(route, TextsRoute):
            handle = partial(self._texts, route)
        else:
            handle = partial(_plain, route, self)
        methods = route.methods if isinstance(route, PlainRoute) else ("POST",)
        return Route(route.path, self._guarded(route, handle), methods=list(methods))

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self._workers.close()
        if self._options.page is not None:
            await self._options.page.close()
        await self.models.close()

    def _guarded(
        self,
        route: AnyRoute,
        handle: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        """Check the key, and turn exceptions into error objects."""

        async def guarded(request: Request) -> Response:
            record = _record(request)
            record.route = route.path
            record.is_logged = not isinstance(route, PlainRoute) or route.is_logged
            try:
                if not (isinstance(route, PlainRoute) and route.is_open):
                    self._check_key(request)
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except RequestError as error:
                return failure(error, request.url.path)
            except ContextOverflowError as error:
                too_long = RequestError(message_of(error), 400, "messages", "context_length_exceeded")
                return failure(too_long, request.url.path)
            except OutOfMemoryError as error:
                return failure(RequestError(message_of(error), 503), request.url.path)
            except SERVER_ERRORS as error:
                return failure(RequestError(message_of(error), 500), request.url.path)
            except EdgeInferError as error:
                return failure(RequestError(message_of(error)), request.url.path)

        return guarded

    def _check_key(self, request: Request) -> None:
        """Clients of OpenAI's and Ollama's APIs send a bearer token, those of Anthropic's `x-api-key`."""
        key, headers = self._options.key, request.headers
        given = headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key", "")
        if key is not None and not any(hmac.compare_digest(each.encode(), key.encode()) for each in given):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return self._queue.running

    def metrics(self) -> tuple[bytes, str]:
        """All metrics, and their media type."""
        return self._metrics.text()

    async def body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request, parsed on another thread."""
        raw = await read_body(request, largest_body(self.models.context))
        return await self._workers.run(lambda: body_of(raw))

    async def _parsed(self, request: Request, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """Parse a request on another thread."""
        raw = await read_body(request, largest_body(self.models.context))
        return await self._workers.run(lambda: parse(body_of(raw)))

    async def prompt_tokens(self, parsed: CompletionRequest, write: Writer) -> int:
        """The number of tokens of a request's prompt, without a completion."""
        lease = await self.models.acquire(parsed.model)
        try:
            responses = write(lease.model, with_reasoning(parsed, lease.model))
            prompt = parsed.prompts[0]
            return len(await self._workers.run(lambda: lease.model.prompt_ids(prompt, **responses.settings)))
        finally:
            lease.release()

    async def _completions(self, route: CompletionRoute, request: Request) -> Response:
        self._queue.admit()
        with ExitStack() as ended:
            ended.callback(self._queue.leave)
            parsed = await self._parsed(request, route.read)
            lease = await unless_disconnected(request, self.models.acquire(parsed.model, parsed.keep_alive))
            if lease is None:
                return Response(status_code=CLIENT_LEFT)
            ended.callback(lease.release)
            record = _record(request)
            record.model = lease.model.name
            if not parsed.prompts:  # a request that only loads the model
                return JSONResponse(route.write(lease.model, parsed).whole([]))
            responses = await self._workers.run(lambda: _format(route, lease.model, parsed))
            response: Response | None
            if parsed.streamed:
                response = await self._streamed(request, responses, record, ended)
            else:
                response = await unless_disconnected(request, self._whole(responses, record))
            return response or Response(status_code=CLIENT_LEFT)

    async def _start(
        self, responses: ResponseFormat, prompt: Any, settings: dict[str, Any]
    ) -> AsyncTokenStream | StoredStream:
        """Start a completion, unless it is stored; tokenization and grammar compilation run on another
        thread.
        """
        cache, model = self._cache(responses.model), responses.model
        if (stored := cache.get(cache.key(prompt, settings))) is not None:
            return StoredStream(stored)
        return await self._workers.run(lambda: model.stream_async(prompt, **settings))

    def _cache(self, model: Model) -> CompletionCache:
        """The completions that are kept of a model with the adapters in use."""
        lora, cache = self._caches.get(model, (None, None))
        if cache is None or lora != model.lora:
            cache = CompletionCache(self._options.response_cache, model.sampling)
            self._caches[model] = model.lora, cache
        return cache

    def _ended(
        self,
        responses: ResponseFormat,
        key: tuple[Any, dict[str, Any]],
        completion: Generation,
        record: RequestRecord,
    ) -> Generation:
        """The completion of a prompt with these settings, which is counted and stored."""
        self._metrics.completed(responses.model.name, completion)
        record.prompt_tokens += len(completion.prompt_ids)
        record.generated_tokens += len(completion.ids)
        cache = self._cache(responses.model)
        cache.put(cache.key(*key), completion)
        return completion

    async def _whole(self, responses: ResponseFormat, record: RequestRecord) -> Response:
        """All completions in one object; they are generated together."""
        keys = _keys(responses)
        streams = [await self._start(responses, *key) for key in keys]  # errors come before the queue

        async def completed(
            key: tuple[Any, dict[str, Any]], stream: AsyncTokenStream | StoredStream
        ) -> Generation:
            async with aclosing(stream):
                async for _ in stream:
                    pass
            return self._ended(responses, key, stream.result, record)

        async with self._queue.slot(responses.model):
            completions = await _all(map(completed, keys, streams))
        return JSONResponse(responses.whole(completions))

    async def _streamed(
        self, request: Request, responses: ResponseFormat, record: RequestRecord, ended: ExitStack
    ) -> Response | None:
        """Wait for the first token: until then a failure has its own HTTP status. `ended` is closed at the
        end of the stream.
        """
        events = self._events(responses, record)
        try:
            first = await unless_disconnected(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        if first is None:
            await events.aclose()
            return None
        return EventStream(first, events, responses, ended.pop_all().close)

    async def _events(self, responses: ResponseFormat, record: RequestRecord) -> AsyncGenerator[bytes, None]:
        """Events of all completions, as they come; a client that disconnects ends generation."""
        keys = _keys(responses)
        streams = [await self._start(responses, *key) for key in keys]  # none begins before it is read
        completions = dict[int, Generation]()

        async def of(index: int) -> AsyncGenerator[bytes, None]:
            key, stream = keys[index], streams[index]
            async with aclosing(stream), aclosing(completion_events(responses, index, stream)) as own:
                async for event in own:
                    yield event
            completions[index] = self._ended(responses, key, stream.result, record)
            for event in responses.finish(index, stream.result):
                yield event

        async with self._queue.slot(responses.model):
            sources = [of(index) for index in range(len(keys))]
            async with aclosing(interleaved(sources)) as events:
                async for event in events:
                    yield event
        for event in responses.end([completions[index] for index in range(len(keys))]):
            yield event

    async def _texts(self, route: TextsRoute, request: Request) -> Response:
        """The response of a request about texts."""
        self._queue.admit()
        with ExitStack() as ended:
            ended.callback(self._queue.leave)
            parsed = await self._parsed(request, route.read)
            response = await unless_disconnected(request, self._of_texts(route, parsed, _record(request)))
            return response or Response(status_code=CLIENT_LEFT)

    async def _of_texts(self, route: TextsRoute, parsed: TextsRequest, record: RequestRecord) -> Response:
        lease = await self.models.acquire(parsed.model)
        record.model = lease.model.name
        try:
            async with self._queue.slot(lease.model):
                reply = await route.reply(TextSteps(lease.model, self._workers), parsed)
        finally:
            lease.release()
        return JSONResponse({**reply, **warnings_of(parsed.warnings)})


def _format(route: CompletionRoute, model: Model, parsed: CompletionRequest) -> ResponseFormat:
    """The writer of a response, for a prompt that fits the context if the request has it truncated."""
    responses = route.write(model, with_reasoning(parsed, model))
    if not parsed.truncates:
        return responses
    return route.write(model, truncated(model, responses.parsed, responses.settings))


def _keys(responses: ResponseFormat) -> list[tuple[Any, dict[str, Any]]]:
    """Prompt and settings of each completion; those of one prompt have consecutive seeds."""
    settings, count = responses.settings, responses.parsed.count
    seed = settings.get("seed")

    def of(index: int) -> dict[str, Any]:
        return {**settings, "seed": seed + index % count} if type(seed) is int else settings

    return [(prompt, of(index)) for index, prompt in prompts_of(responses.parsed)]


async def _all(works: Iterable[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """The results of all; the first error ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _record(request: Request) -> RequestRecord:
    record: RequestRecord = request.scope[RECORD]
    return record


async def _plain(route: PlainRoute, server: _Server, request: Request) -> Response:
    return await route.handle(request, server)


async def _not_found(request: Request, error: Exception) -> Response:
    """Unknown path or method."""
    assert isinstance(error, HTTPException)
    route = f"{request.method} {shortened(request.url.path)}"
    return failure(RequestError(f"{route}: {error.detail}", error.status_code), request.url.path)


async def _internal_error(request: Request, error: Exception) -> Response:
    """An internal error; the traceback is logged."""
    message = f"unexpected {type(error).__name__}: a bug in edgeinfer"
    return failure(RequestError(message, 500), request.url.path)
