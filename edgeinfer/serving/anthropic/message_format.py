"""Writes the responses of /v1/messages."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.reply import ReplyPart, ReplyStream, reply_of
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.response_format import EVENT_STREAM, event, warnings_of

SIGNATURE = "unsigned"
"""Of thinking blocks, in which Anthropic's servers sign their text."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_STARTS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
Json = dict[str, Any]


@dataclass
class MessageFormat:
    """The message of one request."""

    model: Model
    parsed: CompletionRequest
    media_type: str = EVENT_STREAM
    _block: int = field(default=-1, init=False)
    """Index of the open content block."""
    _stream: ReplyStream = field(init=False)
    _open: str = field(default="", init=False)
    """Type of the open content block; "": none is open."""

    @cached_property
    def settings(self) -> Json:
        return self.parsed.tool_use.combined(self.parsed.settings)

    @cached_property
    def _id(self) -> str:
        return f"msg_{secrets.token_hex(12)}"

    def whole(self, completions: Sequence[Generation]) -> Json:
        completion = completions[0]
        reply = reply_of(self.model, self.parsed, completion)
        content: list[Json] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        content += [
            {"type": "tool_use", "id": _tool_id(call.id), "name": call.name, "input": call.values}
            for call in reply.calls
        ]
        return {**self._message(completion), "content": content, **self._ending(completion, reply.finish)}

    def _message(self, completion: Generation) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(completion),
            **warnings_of(self.parsed.warnings),
        }

    def _ending(self, completion: Generation, finish: str) -> Json:
        stop = self._stop_sequence(completion) if finish == "stop" else None
        reason = _REASONS[finish] if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _stop_sequence(self, completion: Generation) -> str | None:
        """The stop text that ended a completion."""
        stops = self.parsed.settings.get("stop") or ()
        whole = self.model.tokenizer.decode(completion.ids)
        return next((stop for stop in stops if stop in whole and stop not in completion.text), None)

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        self._stream = ReplyStream(self.model, self.parsed, completion)
        yield _event("message_start", message=self._message(completion))
        yield _event("ping")

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        for part in self._stream.add(token):
            yield from self._part(part)

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        parts, reason = self._stream.end(completion)
        for part in parts:
            yield from self._part(part)
        yield from self._close_block()
        yield _event("message_delta", delta=self._ending(completion, reason), usage=_usage(completion))

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        yield _event("message_stop")

    def failed(self, message: str) -> Iterable[bytes]:
        yield _event("error", error={"type": "api_error", "message": message})

    def _part(self, part: ReplyPart) -> Iterable[bytes]:
        if part.reasoning:
            yield from self._open_block("thinking", _STARTS["thinking"])
            yield self._delta({"type": "thinking_delta", "thinking": part.reasoning})
        elif part.call is None:
            yield from self._open_block("text", _STARTS["text"])
            yield self._delta({"type": "text_delta", "text": part.text})
        else:
            call_id, delta = part.call
            if delta.name is not None:
                yield from self._close_block()
                block = {"type": "tool_use", "id": _tool_id(call_id), "name": delta.name, "input": {}}
                yield from self._open_block("tool_use", block)
            if delta.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _open_block(self, kind: str, block: Json) -> Iterable[bytes]:
        if self._open != kind:
            yield from self._close_block()
            self._open = kind
            self._block += 1
            yield _event("content_block_start", index=self._block, content_block=block)

    def _close_block(self) -> Iterable[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield _event("content_block_stop", index=self._block)
        self._open = ""

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _tool_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _usage(completion: Generation) -> Json:
    cached = completion.speed.cached_tokens
    return {
        "input_tokens": len(completion.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": len(completion.ids),
    }
