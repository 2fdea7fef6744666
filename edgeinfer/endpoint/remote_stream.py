"""The token stream of a completion that a server generates."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from edgeinfer.endpoint.connection import EventStream
from edgeinfer.endpoint.messages import CLOSING, OPENING, CallParts, RemoteCompletion, finish_of, reasoning_in
from edgeinfer.errors import EdgeInferError
from edgeinfer.options.option_field import Progress
from edgeinfer.results import FinishReason, Generation, Speed, Token

POLL_SECONDS = 0.1
"""How often a stream that waits for the server calls `progress`, which may cancel it."""
NO_ID = -1
"""The id of a token whose id isn't known."""
OpenStream = Callable[[], tuple[EventStream, int]]
"""Sends the request; returns its events, and the number of messages that were dropped for it."""


class RemoteStream:
    """An iterator of tokens, as `TokenStream`; a token is what one event has. The request is sent by the
    first one, on a thread, so that Ctrl-C and `cancel` end it at once.

    `has_limit`: the request limits its tokens. `on_end` is called once with the completion.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        has_limit: bool,
        progress: Progress | None = None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> None:
        self._open, self._has_limit = open_stream, has_limit
        self._progress, self._on_end = progress, on_end
        self._events: SimpleQueue[dict[str, Any] | Exception | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._stream: EventStream | None = None
        self._tokens: list[Token] = []
        self._calls = CallParts()
        self._usage: Mapping[str, Any] = {}
        self._dropped = 0
        self._reason: FinishReason = "cancelled"
        self._is_reasoning = self._has_begun = self._has_ended = False
        self._times: list[float] = []
        """When the request was sent, and when the first and the latest token arrived."""

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        try:
            while not self._has_ended:
                event = self._next_event()
                if event is None:
                    self._end()
                elif text := self._text_of(event):
                    return self._token(text)
        except BaseException:
            self.cancel()
            raise
        raise StopIteration

    def _next_event(self) -> dict[str, Any] | None:
        """The next event; None after the last. Raises the error that ended the stream."""
        if not self._has_begun:
            self._has_begun = True
            self._times.append(time.perf_counter())
            threading.Thread(target=self._receive, name="edgeinfer-endpoint", daemon=True).start()
        while not self._has_ended:
            try:
                event = self._events.get(timeout=POLL_SECONDS)
            except Empty:
                if self._progress is not None and not self._tokens:
                    self._progress(0, 0)
                continue
            if isinstance(event, Exception):
                raise event
            return event
        return None

    def _receive(self) -> None:
        """Send the request and queue its events, on a thread."""
        try:
            stream, self._dropped = self._open()
            with self._lock:
                self._stream = stream
                is_cancelled = self._has_ended
            if is_cancelled:
                stream.close()
                return
            for event in stream:
                self._events.put(event)
            self._events.put(None)
        except Exception as error:
            self._events.put(error)

    def _text_of(self, event: Mapping[str, Any]) -> str:
        """The text of an event; its calls, reason and usage are kept."""
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            self._usage = usage
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        if choice.get("finish_reason") is not None:
            self._reason = finish_of(choice["finish_reason"], self._has_limit)
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            text = choice.get("text")
            return text if isinstance(text, str) else ""
        self._calls.add(delta.get("tool_calls"))
        return self._marked(reasoning_in(delta), delta.get("content"), bool(delta.get("tool_calls")))

    def _marked(self, reasoning: str, content: object, has_calls: bool) -> str:
        """The text of a delta, with the mark where reasoning begins or ends."""
        text = ""
        if reasoning and not self._is_reasoning:
            text, self._is_reasoning = OPENING, True
        text += reasoning
        response = content if isinstance(content, str) else ""
        if self._is_reasoning and (response or has_calls):
            text, self._is_reasoning = text + CLOSING, False
        return text + response

    def _token(self, text: str) -> Token:
        now = time.perf_counter()
        self._times[1:] = [self._times[1] if len(self._times) > 1 else now, now]
        self._tokens.append(Token(NO_ID, text))
        return self._tokens[-1]

    def cancel(self) -> None:
        """Stop here; the text so far remains, and the closed connection ends the work of the server."""
        with self._lock:
            if not self._has_ended:
                self._reason = "cancelled"
            stream = self._stream
        if stream is not None:
            stream.close()
        self._end()

    def _end(self) -> None:
        with self._lock:
            first, self._has_ended = not self._has_ended, True
        if first and self._stream is not None:
            self._stream.close()
        if first and self._on_end:
            self._on_end(self.result)

    @property
    def result(self) -> RemoteCompletion:
        """The completion so far."""
        return RemoteCompletion(
            text="".join(token.text for token in self._tokens),
            ids=[],
            finish_reason=self._reason,
            speed=speed_of(self._usage, len(self._tokens), self._times),
            tokens=list(self._tokens),
            dropped_messages=self._dropped,
            calls=self._calls.calls,
        )


def speed_of(usage: Mapping[str, Any], tokens: int, times: list[float]) -> Speed:
    """The speed as seen from here. `tokens`: events with text, used without the server's `usage`; `times`:
    of the request, of its first and of its last token.
    """
    details = usage.get("prompt_tokens_details")
    prompt = _count(usage, "prompt_tokens")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    generated = _count(usage, "completion_tokens") or tokens
    first = times[1] - times[0] if len(times) > 1 else 0.0
    rest = times[2] - times[1] if len(times) > 2 else 0.0
    return Speed(
        prompt_tokens=prompt,
        cached_tokens=min(cached, prompt),
        generated_tokens=generated,
        seconds_to_first_token=first,
        prompt_tokens_per_second=(prompt - min(cached, prompt)) / first if first > 0 else 0.0,
        decode_tokens_per_second=(generated - 1) / rest if rest > 0 and generated > 1 else 0.0,
    )


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def refuse_closed(is_closed: bool, name: str) -> None:
    """Raise `EdgeInferError` if the model has been closed."""
    if is_closed:
        raise EdgeInferError(f"{name} has been closed; load it again")
