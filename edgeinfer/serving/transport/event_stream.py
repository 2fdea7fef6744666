"""A streamed response, whose events come from a generator."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from edgeinfer.errors import EdgeInferError
from edgeinfer.generation.async_stream import AsyncTokenStream
from edgeinfer.generation.completion_cache import StoredStream
from edgeinfer.serving.completion.response_format import ResponseFormat
from edgeinfer.serving.transport.failures import message_of


async def completion_events(
    responses: ResponseFormat, index: int, stream: AsyncTokenStream | StoredStream
) -> AsyncGenerator[bytes, None]:
    """The events of a completion's start, when its first token or its end has come, and of its tokens."""
    opened = False
    async for token in stream:
        if not opened:
            opened = True
            for event in responses.start(index, stream.result):
                yield event
        for event in responses.token(index, token):
            yield event
    if not opened:
        for event in responses.start(index, stream.result):
            yield event


class EventStream(StreamingResponse):
    """A response of events; `on_end` is called once, even if it was never sent."""

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        responses: ResponseFormat,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(
            self._all(first, events, responses),
            media_type=responses.media_type,
            headers={"Cache-Control": "no-cache"},
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
    async def _all(
        first: bytes, events: AsyncGenerator[bytes, None], responses: ResponseFormat
    ) -> AsyncIterator[bytes]:
        yield first
        try:
            async for event in events:
                yield event
        except EdgeInferError as error:
            for event in responses.failed(message_of(error)):
                yield event
