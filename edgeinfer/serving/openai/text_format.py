"""Writes the responses of /v1/completions."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.reply import FINISHES
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.completion.response_format import EVENT_STREAM, event, warnings_of
from edgeinfer.serving.openai import replies
from edgeinfer.serving.transport.failures import openai_error

Chunk = dict[str, Any]


@dataclass
class TextFormat:
    """Text completions of one request."""

    model: Model
    parsed: CompletionRequest
    media_type: str = EVENT_STREAM
    _warned: bool = field(default=False, init=False)

    @property
    def settings(self) -> dict[str, Any]:
        return self.parsed.settings

    @cached_property
    def _head(self) -> Chunk:
        return {
            "id": replies.new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model.name,
        }

    def whole(self, completions: Sequence[Generation]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(index, one) for index, one in enumerate(completions)],
            "usage": replies.usage(completions),
            "timings": replies.timings(completions[-1]),
            **warnings_of(self.parsed.warnings),
        }

    def _choice(self, index: int, completion: Generation) -> Chunk:
        text = self._echoed(completion.prompt_ids) + completion.text
        choice = self._piece(index, text, FINISHES[completion.finish_reason])
        if "logprobs" in self.parsed.settings:
            choice["logprobs"] = replies.text_logprobs(completion.tokens, self.model.tokenizer)
        return choice

    def _echoed(self, prompt_ids: list[int]) -> str:
        return self.model.tokenizer.decode(prompt_ids) if self.parsed.echo else ""

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        if text := self._echoed(completion.prompt_ids):
            yield self._event([self._piece(index, text)])

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        piece = self._piece(index, token.text)
        if "logprobs" in self.parsed.settings:
            piece["logprobs"] = replies.text_logprobs([token], self.model.tokenizer)
        yield self._event([piece])

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        yield self._event([self._piece(index, "", FINISHES[completion.finish_reason])])

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        if self.parsed.usage_at_end:
            yield self._event([], usage=replies.usage(completions))
        yield event("[DONE]")

    def failed(self, message: str) -> Iterable[bytes]:
        yield event(openai_error(message, "server_error"))

    def _piece(self, index: int, text: str, reason: str | None = None) -> Chunk:
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}

    def _event(self, choices: list[Chunk], **fields: Any) -> bytes:
        """An event; the first one has the warnings."""
        extra = {} if self._warned else warnings_of(self.parsed.warnings)
        self._warned = True
        return event({**self._head, "choices": choices, **extra, **fields})
