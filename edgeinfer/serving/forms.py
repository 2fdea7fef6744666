"""The two response formats, chat and text completions: their choices and stream chunks."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from edgeinfer.chat_templates.tool_calls import Said, parse_tool_calls
from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving import replies
from edgeinfer.serving.requests import CompletionRequest

Piece = dict[str, Any]


class Form(Protocol):
    """The differences between the two formats."""

    @property
    def ask(self) -> CompletionRequest: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords of `Model.stream`."""
        ...

    def head(self, streamed: bool) -> Piece:
        """Fields at the start of every object of one response."""
        ...

    def choice(self, index: int, answer: Generation) -> Piece:
        """A complete choice."""
        ...

    def first_pieces(self, index: int, answer: Generation) -> list[Piece]:
        """Chunks before the first token."""
        ...

    def pieces(self, index: int, token: Token) -> list[Piece]:
        """Chunks for a token."""
        ...

    def last_pieces(self, index: int, answer: Generation) -> list[Piece]:
        """Chunks at the end."""
        ...


@dataclass(frozen=True)
class ChatForm:
    """/v1/chat/completions. With tools, text is held back to the end, because it may be a tool call."""

    model: Model
    ask: CompletionRequest

    @property
    def settings(self) -> dict[str, Any]:
        return self.ask.settings | ({"tools": self.ask.tools} if self.ask.tools else {})

    @cached_property
    def _id(self) -> str:
        return replies.new_id("chatcmpl")

    def head(self, streamed: bool) -> Piece:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self.model.name}

    def choice(self, index: int, answer: Generation) -> Piece:
        said = self._said(answer)
        found = {
            "index": index,
            "message": replies.chat_message(said),
            "finish_reason": replies.finish(answer, said),
        }
        if "logprobs" in self.ask.settings:
            found["logprobs"] = replies.chat_logprobs(answer.tokens, self.model.tokenizer)
        return found

    def _said(self, answer: Generation) -> Said:
        """The response text and its tool calls."""
        if not self.ask.tools:
            return Said(answer.text, ())
        whole = self.model.tokenizer.decode(answer.ids, special=True)
        said = parse_tool_calls(whole, self.ask.tools)
        return said if said.calls else Said(answer.text, ())

    def first_pieces(self, index: int, answer: Generation) -> list[Piece]:
        return []

    def pieces(self, index: int, token: Token) -> list[Piece]:
        if self.ask.tools:
            return []
        piece = _delta(index, {"content": token.text})
        if "logprobs" in self.ask.settings:
            piece["logprobs"] = replies.chat_logprobs([token], self.model.tokenizer)
        return [piece] if token.text or "logprobs" in piece else []

    def last_pieces(self, index: int, answer: Generation) -> list[Piece]:
        said = self._said(answer)
        found = []
        if self.ask.tools and said.content:
            found.append(_delta(index, {"content": said.content}))
        if said.calls:
            found.append(_delta(index, {"tool_calls": replies.tool_calls(said)}))
        return [*found, {"index": index, "delta": {}, "finish_reason": replies.finish(answer, said)}]


def _delta(index: int, delta: Piece) -> Piece:
    return {"index": index, "delta": {"role": "assistant", **delta}, "finish_reason": None}


@dataclass(frozen=True)
class TextForm:
    """/v1/completions."""

    model: Model
    ask: CompletionRequest

    @property
    def settings(self) -> dict[str, Any]:
        return self.ask.settings

    @cached_property
    def _id(self) -> str:
        return replies.new_id("cmpl")

    def head(self, streamed: bool) -> Piece:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model.name,
        }

    def choice(self, index: int, answer: Generation) -> Piece:
        found = {
            "index": index,
            "text": self._echoed(answer.prompt_ids) + answer.text,
            "finish_reason": replies.finish(answer),
            "logprobs": None,
        }
        if "logprobs" in self.ask.settings:
            found["logprobs"] = replies.text_logprobs(answer.tokens, self.model.tokenizer)
        return found

    def _echoed(self, prompt_ids: list[int]) -> str:
        return self.model.tokenizer.decode(prompt_ids) if self.ask.echo else ""

    def first_pieces(self, index: int, answer: Generation) -> list[Piece]:
        text = self._echoed(answer.prompt_ids)
        return [{"index": index, "text": text, "finish_reason": None, "logprobs": None}] if text else []

    def pieces(self, index: int, token: Token) -> list[Piece]:
        piece = {"index": index, "text": token.text, "finish_reason": None, "logprobs": None}
        if "logprobs" in self.ask.settings:
            piece["logprobs"] = replies.text_logprobs([token], self.model.tokenizer)
        return [piece]

    def last_pieces(self, index: int, answer: Generation) -> list[Piece]:
        return [{"index": index, "text": "", "finish_reason": replies.finish(answer), "logprobs": None}]
