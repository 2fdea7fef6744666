"""The two response formats, chat and text completions: their choices and stream chunks."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from edgeinfer.chat_templates.tool_call_stream import ToolCallStream
from edgeinfer.chat_templates.tool_calls import ParsedReply, parse_tool_calls
from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving import replies
from edgeinfer.serving.requests import CompletionRequest

Chunk = dict[str, Any]


class ResponseFormat(Protocol):
    """The differences between the two formats."""

    @property
    def parsed(self) -> CompletionRequest: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of `Model.stream`."""
        ...

    def head(self, streamed: bool) -> Chunk:
        """Fields at the start of every object of one response."""
        ...

    def choice(self, index: int, completion: Generation) -> Chunk:
        """A complete choice."""
        ...

    def first_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        """Chunks before the first token."""
        ...

    def chunks(self, index: int, token: Token) -> list[Chunk]:
        """Chunks for a token."""
        ...

    def last_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        """Chunks at the end."""
        ...


@dataclass(frozen=True)
class ChatResponses:
    """/v1/chat/completions. With tools, text is held back where a tool call may begin."""

    model: Model
    parsed: CompletionRequest
    _streams: defaultdict[int, ToolCallStream] = field(
        default_factory=lambda: defaultdict(ToolCallStream), init=False
    )

    @property
    def settings(self) -> dict[str, Any]:
        return self.parsed.settings | ({"tools": self.parsed.tools} if self.parsed.tools else {})

    @cached_property
    def _id(self) -> str:
        return replies.new_id("chatcmpl")

    def head(self, streamed: bool) -> Chunk:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self.model.name}

    def choice(self, index: int, completion: Generation) -> Chunk:
        reply = self._reply(completion)
        choice = {
            "index": index,
            "message": replies.chat_message(reply),
            "finish_reason": replies.finish(completion, reply),
        }
        if "logprobs" in self.parsed.settings:
            choice["logprobs"] = replies.chat_logprobs(completion.tokens, self.model.tokenizer)
        return choice

    def _reply(self, completion: Generation) -> ParsedReply:
        """The response text and its tool calls."""
        if not self.parsed.tools:
            return ParsedReply(completion.text, ())
        whole = self.model.tokenizer.decode(completion.ids, special=True)
        reply = parse_tool_calls(whole, self.parsed.tools)
        return reply if reply.calls else ParsedReply(completion.text, ())

    def first_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        return []

    def chunks(self, index: int, token: Token) -> list[Chunk]:
        if self.parsed.tools:
            piece = self.model.tokenizer.token_bytes(token.id).decode("utf-8", "replace")
            text = self._streams[index].add(token.text, piece)
            return [_delta(index, {"content": text})] if text else []
        chunk = _delta(index, {"content": token.text})
        if "logprobs" in self.parsed.settings:
            chunk["logprobs"] = replies.chat_logprobs([token], self.model.tokenizer)
        return [chunk] if token.text or "logprobs" in chunk else []

    def last_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        reply = self._reply(completion)
        chunks = []
        if self.parsed.tools and (text := self._streams[index].rest(reply, completion.text)):
            chunks.append(_delta(index, {"content": text}))
        if reply.calls:
            chunks.append(_delta(index, {"tool_calls": replies.tool_calls(reply)}))
        return [*chunks, {"index": index, "delta": {}, "finish_reason": replies.finish(completion, reply)}]


def _delta(index: int, delta: Chunk) -> Chunk:
    return {"index": index, "delta": {"role": "assistant", **delta}, "finish_reason": None}


@dataclass(frozen=True)
class TextResponses:
    """/v1/completions."""

    model: Model
    parsed: CompletionRequest

    @property
    def settings(self) -> dict[str, Any]:
        return self.parsed.settings

    @cached_property
    def _id(self) -> str:
        return replies.new_id("cmpl")

    def head(self, streamed: bool) -> Chunk:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model.name,
        }

    def choice(self, index: int, completion: Generation) -> Chunk:
        choice = {
            "index": index,
            "text": self._echoed(completion.prompt_ids) + completion.text,
            "finish_reason": replies.finish(completion),
            "logprobs": None,
        }
        if "logprobs" in self.parsed.settings:
            choice["logprobs"] = replies.text_logprobs(completion.tokens, self.model.tokenizer)
        return choice

    def _echoed(self, prompt_ids: list[int]) -> str:
        return self.model.tokenizer.decode(prompt_ids) if self.parsed.echo else ""

    def first_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        text = self._echoed(completion.prompt_ids)
        return [{"index": index, "text": text, "finish_reason": None, "logprobs": None}] if text else []

    def chunks(self, index: int, token: Token) -> list[Chunk]:
        chunk = {"index": index, "text": token.text, "finish_reason": None, "logprobs": None}
        if "logprobs" in self.parsed.settings:
            chunk["logprobs"] = replies.text_logprobs([token], self.model.tokenizer)
        return [chunk]

    def last_chunks(self, index: int, completion: Generation) -> list[Chunk]:
        return [{"index": index, "text": "", "finish_reason": replies.finish(completion), "logprobs": None}]
