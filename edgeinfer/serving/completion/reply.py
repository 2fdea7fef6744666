"""A chat response in the internal form: reasoning, text and tool calls, complete or in parts as they come."""

import codecs
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.chat_templates.call_formats import CALL_MARKS
from edgeinfer.chat_templates.call_stream import CallDelta, CallStream, arguments_text
from edgeinfer.chat_templates.reasoning import closing_mark, parted
from edgeinfer.chat_templates.tool_call_stream import ToolCallStream
from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, parse_tool_calls
from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.tool_choice import ToolUse
from edgeinfer.tokenizer.reasoning_marks import AFTER_RESPONSE

PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may open a reasoning block."""
_MARK_BEGIN = "<"
"""All marks after a response begin with it."""
FINISHES = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}


@dataclass(frozen=True)
class ReplyCall:
    """A tool call with its id; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as an object; empty if the text isn't complete."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Reply:
    """A complete chat response. `finish`: stop, length or tool_calls."""

    reasoning: str
    text: str
    calls: tuple[ReplyCall, ...]
    finish: str


@dataclass(frozen=True)
class ReplyPart:
    """What is new after a token. `call`: the id, and a piece of a tool call."""

    reasoning: str = ""
    text: str = ""
    call: tuple[str, CallDelta] | None = None


def call_id() -> str:
    """For example `call_1f0c…`."""
    return f"call_{secrets.token_hex(12)}"


def reply_of(model: Model, parsed: CompletionRequest, completion: Generation) -> Reply:
    """The response of a complete generation."""
    content = _content(model, parsed.tool_use, completion)
    calls = tuple(ReplyCall(call_id(), call.name, arguments_text(call)) for call in content.calls)
    finish = "tool_calls" if calls else FINISHES[completion.finish_reason]
    return Reply(content.reasoning, content.text, calls, finish)


@dataclass(frozen=True)
class _Content:
    reasoning: str
    text: str
    calls: tuple[ToolCall, ...] = ()


def _content(model: Model, use: ToolUse, completion: Generation) -> _Content:
    if use.forced:
        calls = _forced_calls(completion.text)
        return _Content("", "" if calls else completion.text, calls)
    parsed = ParsedReply(completion.text, ())
    if use.tools:
        whole = parse_tool_calls(model.tokenizer.decode(completion.ids, special=True), use.tools)
        parsed = whole if whole.calls else parsed
    parts = parted(parsed.content, _opens_reasoning(model, completion))
    text = parts.response
    if not parts.reasoning and text == parsed.content.lstrip():
        text = parsed.content
    return _Content(parts.reasoning.strip(), text, parsed.calls if use.parallel else parsed.calls[:1])


def _forced_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls that a grammar forced; none if the text isn't complete."""
    try:
        value = json.loads(text)
    except ValueError:
        return ()
    return tuple(
        ToolCall(call["name"], call["arguments"]) for call in (value if isinstance(value, list) else [value])
    )


def _opens_reasoning(model: Model, completion: Generation) -> bool:
    """Whether the prompt ends in an open reasoning block."""
    end = completion.prompt_ids[-PROMPT_END:]
    return closing_mark(model.tokenizer.decode(end, special=True)) is not None


@dataclass
class ReplyStream:
    """One response in parts. Text is held back where a mark of reasoning or of a tool call may begin."""

    model: Model
    parsed: CompletionRequest
    begun: Generation
    """The completion when its prompt had been read."""
    _text: str = field(default="", init=False)
    """Visible text until the response begins; after that the text that is held back."""
    _reasoning: str = field(default="", init=False)
    _sent: list[str] = field(default_factory=list, init=False)
    _responds: bool = field(default=False, init=False)
    """Whether the reasoning has ended."""
    _ids: dict[int, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        use = self.parsed.tool_use
        self._holder = ToolCallStream()
        self._calls = CallStream(use.tools, use.parallel)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._opened = _opens_reasoning(self.model, self.begun)
        self._responds = use.forced

    def add(self, token: Token) -> list[ReplyPart]:
        """The parts after a token."""
        if self._responds and not self.parsed.tool_use.tools:
            return self._plain(token.text)
        piece = self._decoder.decode(self.model.tokenizer.token_bytes(token.id))
        if self._responds:
            return self._response(token.text, piece)
        self._text += token.text
        parts = parted(self._text, self._opened, ended=False)
        result = self._reasoned(parts.reasoning)
        hidden_mark = not token.text and any(mark in piece for mark in CALL_MARKS)
        if parts.thinking or not (parts.response or (hidden_mark and self.parsed.tool_use.tools)):
            return result
        self._responds = True
        text = self._text if not parts.reasoning and parts.response == self._text.lstrip() else parts.response
        self._text = ""
        return result + self._response(text, text or piece)

    def _reasoned(self, reasoning: str) -> list[ReplyPart]:
        reasoning = reasoning.strip()
        if not reasoning.startswith(self._reasoning) or reasoning == self._reasoning:
            return []
        new, self._reasoning = reasoning[len(self._reasoning) :], reasoning
        return [ReplyPart(reasoning=new)]

    def _response(self, text: str, piece: str) -> list[ReplyPart]:
        """The parts of text after the reasoning. `piece`: with special tokens."""
        use = self.parsed.tool_use
        if not use.tools:
            return self._plain(text)
        content = "" if use.forced else self._holder.add(text, piece)
        self._sent.append(content)
        parts = [ReplyPart(text=content)] if content else []
        return parts + self._call_parts(self._calls.add(piece))

    def _plain(self, text: str) -> list[ReplyPart]:
        """Text without tools; a mark after the response that begins at its end is held back."""
        text = self._text + text
        held = _partial_mark(text) if _MARK_BEGIN in text else 0
        ready, self._text = (text[:-held], text[-held:]) if held else (text, "")
        self._sent.append(ready)
        return [ReplyPart(text=ready)] if ready else []

    def _call_parts(self, deltas: list[CallDelta]) -> list[ReplyPart]:
        return [ReplyPart(call=(self._ids.setdefault(one.index, call_id()), one)) for one in deltas]

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        return reasoning_tokens(self.model, self._reasoning)

    def end(self, completion: Generation) -> tuple[list[ReplyPart], str]:
        """The remaining parts, and the finish reason."""
        content = _content(self.model, self.parsed.tool_use, completion)
        parts = self._reasoned(content.reasoning)
        sent = "".join(self._sent)
        text = content.text[len(sent) :] if content.text.startswith(sent) else ""
        if self.parsed.tool_use.tools and not self.parsed.tool_use.forced:
            text = self._holder.rest(ParsedReply(content.text, content.calls), content.text)
        parts += [ReplyPart(text=text)] if text else []
        parts += self._call_parts(self._calls.rest(content.calls))
        return parts, "tool_calls" if content.calls else FINISHES[completion.finish_reason]


def _partial_mark(text: str) -> int:
    """Characters at the end of a text that may begin a mark after the response."""
    begins = (
        length
        for mark in AFTER_RESPONSE
        for length in range(1, len(mark) + 1)
        if text.endswith(mark[:length])
    )
    return max(begins, default=0)


def reasoning_tokens(model: Model, reasoning: str) -> int:
    """The number of tokens of a reasoning, without its marks."""
    return len(model.tokenizer.encode(reasoning)) if reasoning else 0
