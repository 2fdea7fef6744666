"""Writes the responses of /v1/chat/completions."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.reply import Reply, ReplyPart, ReplyStream, reasoning_tokens, reply_of
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.response_format import EVENT_STREAM, event, warnings_of
from edgeinfer.serving.openai import replies
from edgeinfer.serving.transport.failures import openai_error

Chunk = dict[str, Any]


@dataclass
class ChatFormat:
    """Chat completions of one request."""

    model: Model
    parsed: CompletionRequest
    media_type: str = EVENT_STREAM
    _warned: bool = field(default=False, init=False)
    _streams: dict[int, ReplyStream] = field(default_factory=dict, init=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.parsed.tool_use.combined(self.parsed.settings)

    @cached_property
    def _head(self) -> Chunk:
        return {
            "id": replies.new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.model.name,
        }

    @property
    def _has_logprobs(self) -> bool:
        return "logprobs" in self.parsed.settings

    def whole(self, completions: Sequence[Generation]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, one) for index, one in enumerate(completions)],
            "usage": self._usage(completions),
            "timings": replies.timings(completions[-1]),
            **warnings_of(self.parsed.warnings),
        }

    def _usage(self, completions: Sequence[Generation]) -> Chunk:
        """The tokens, with those of the reasoning."""
        reasoning = [reply_of(self.model, self.parsed, one).reasoning for one in completions]
        tokens = sum(reasoning_tokens(self.model, text) for text in reasoning)
        return replies.usage(completions) | {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _choice(self, index: int, completion: Generation) -> Chunk:
        reply = reply_of(self.model, self.parsed, completion)
        choice: Chunk = {"index": index, "message": _message(reply), "finish_reason": reply.finish}
        if self._has_logprobs:
            choice["logprobs"] = replies.chat_logprobs(completion.tokens, self.model.tokenizer)
        return choice

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        self._streams[index] = ReplyStream(self.model, self.parsed, completion)
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        deltas = [_delta(part) for part in self._streams[index].add(token)]
        logprobs = replies.chat_logprobs([token], self.model.tokenizer) if self._has_logprobs else None
        for number, delta in enumerate(deltas or [{}] * (logprobs is not None)):
            yield self._chunk(index, delta, logprobs=logprobs if number == 0 else None)

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        parts, reason = self._streams[index].end(completion)
        for part in parts:
            yield self._chunk(index, _delta(part))
        yield self._chunk(index, {}, reason)

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        if self.parsed.usage_at_end:
            yield event(self._event([]) | {"usage": self._usage(completions)})
        yield event("[DONE]")

    def failed(self, message: str) -> Iterable[bytes]:
        yield event(openai_error(message, "server_error"))

    def _chunk(
        self, index: int, delta: Chunk, reason: str | None = None, logprobs: Chunk | None = None
    ) -> bytes:
        choice: Chunk = {"index": index, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return event(self._event([choice]))

    def _event(self, choices: list[Chunk]) -> Chunk:
        """A chunk; the first one has the warnings."""
        extra = {} if self._warned else warnings_of(self.parsed.warnings)
        self._warned = True
        return {**self._head, "choices": choices, **extra}


def _message(reply: Reply) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "index": index,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(reply.calls)
        ]
    return message


def _delta(part: ReplyPart) -> Chunk:
    if part.reasoning:
        return {"reasoning_content": part.reasoning}
    if part.call is None:
        return {"content": part.text}
    call_id, delta = part.call
    call: Chunk = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.name is not None:
        call |= {"id": call_id, "type": "function"}
        call["function"]["name"] = delta.name
    return {"tool_calls": [call]}
