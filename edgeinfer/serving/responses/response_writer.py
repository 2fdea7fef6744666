"""Writes the responses of /v1/responses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.reply import ReplyStream, reasoning_tokens, reply_of
from edgeinfer.serving.completion.response_format import EVENT_STREAM, event, warnings_of
from edgeinfer.serving.openai import replies
from edgeinfer.serving.responses.item_events import ItemEvents
from edgeinfer.serving.responses.items import Item
from edgeinfer.serving.responses.output_items import call_item, message_item, reasoning_item
from edgeinfer.serving.responses.requests import ResponsesRequest
from edgeinfer.serving.responses.store import ResponseStore, StoredResponse

Json = dict[str, Any]


@dataclass
class ResponsesFormat:
    """The response of one request; it is stored when it is complete."""

    model: Model
    parsed: ResponsesRequest
    store: ResponseStore
    media_type: str = EVENT_STREAM
    _stream: ReplyStream = field(init=False)
    _sequence: int = field(default=0, init=False)

    @cached_property
    def settings(self) -> Json:
        return self.parsed.tool_use.combined(self.parsed.settings)

    @cached_property
    def _items(self) -> ItemEvents:
        return ItemEvents(self.parsed.summarizes)

    @property
    def _has_logprobs(self) -> bool:
        return "logprobs" in self.parsed.settings

    def whole(self, completions: Sequence[Generation]) -> Json:
        completion = completions[0]
        reply = reply_of(self.model, self.parsed, completion)
        output: list[Item] = []
        if reply.reasoning:
            output.append(reasoning_item(reply.reasoning, self.parsed.summarizes))
        if reply.text or not reply.calls:
            output.append(message_item(reply.text, self._logprobs(completion.tokens)))
        output += [call_item(call.id, call.name, call.arguments) for call in reply.calls]
        return self._stored(completion, output, reply.finish, reasoning_tokens(self.model, reply.reasoning))

    def _logprobs(self, tokens: Sequence[Token]) -> list[Json]:
        if not self._has_logprobs:
            return []
        logprobs: list[Json] = replies.chat_logprobs(tokens, self.model.tokenizer)["content"]
        return logprobs

    def _stored(self, completion: Generation, output: list[Item], finish: str, reasoning: int) -> Json:
        """The final response, which is stored. `reasoning`: tokens of it."""
        ended = "incomplete" if finish == "length" else "completed"
        response = self._response(ended, output) | {"usage": _usage(completion, reasoning)}
        if ended == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.parsed.store:
            parsed = self.parsed
            conversation = (*parsed.conversation, *parsed.input, *output)
            self.store.put(StoredResponse(response, parsed.input, conversation))
        return response

    def _response(self, status: str, output: list[Item]) -> Json:
        return {
            "id": self.parsed.id,
            "object": "response",
            "created_at": self.parsed.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model.name,
            "output": output,
            "store": self.parsed.store,
            "usage": None,
            **self.parsed.shown,
            **warnings_of(self.parsed.warnings),
        }

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        self._stream = ReplyStream(self.model, self.parsed, completion)
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response("in_progress", [])})

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        logprobs = self._logprobs([token])
        for part in self._stream.add(token):
            yield from map(self._event, self._items.part(part, logprobs))
            logprobs = []

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        parts, reason = self._stream.end(completion)
        for part in parts:
            yield from map(self._event, self._items.part(part, []))
        yield from map(self._event, self._items.end("incomplete" if reason == "length" else "completed"))
        response = self._stored(completion, self._items.output, reason, self._stream.reasoning_tokens)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        return ()

    def failed(self, message: str) -> Iterable[bytes]:
        error = {"code": "server_error", "message": message}
        response = self._response("failed", self._items.output) | {"error": error}
        yield self._event({"type": "response.failed", "response": response})

    def _event(self, data: Json) -> bytes:
        numbered = {**data, "sequence_number": self._sequence}
        self._sequence += 1
        return event(numbered, data["type"])


def _usage(completion: Generation, reasoning: int) -> Json:
    read, generated = len(completion.prompt_ids), len(completion.ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": completion.speed.cached_tokens},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": read + generated,
    }
