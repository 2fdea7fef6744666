"""Writes the responses of /api/chat, /api/generate and /api/embed: objects, or lines of them."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from edgeinfer.chat_templates.call_stream import CallDelta
from edgeinfer.model import Model
from edgeinfer.results import Generation, Token
from edgeinfer.serving.completion.reply import FINISHES, Reply, ReplyCall, ReplyPart, ReplyStream, reply_of
from edgeinfer.serving.completion.response_format import warnings_of
from edgeinfer.serving.ollama.requests import OllamaEmbedding, OllamaRequest
from edgeinfer.serving.openai import replies
from edgeinfer.serving.text_steps import TextSteps

Json = dict[str, Any]


def now() -> str:
    """The time in the format of Ollama."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * 1e9)


@dataclass
class OllamaFormat:
    """The response of one request."""

    model: Model
    parsed: OllamaRequest
    media_type: str = "application/x-ndjson"
    _stream: ReplyStream = field(init=False)
    _call: ReplyCall | None = field(default=None, init=False)
    """The call that is being written: it is sent when it is complete."""
    _ready: float = field(default_factory=time.perf_counter, init=False)
    """When the model was loaded."""

    @cached_property
    def settings(self) -> Json:
        return self.parsed.tool_use.combined(self.parsed.settings)

    def whole(self, completions: Sequence[Generation]) -> Json:
        if not completions:
            unloads = self.parsed.keep_alive == 0
            done = {"done": True, "done_reason": "unload" if unloads else "load"}
            return {**self._object(Reply("", "", (), "stop")), **done}
        completion = completions[0]
        reply = reply_of(self.model, self.parsed, completion)
        return {**self._object(reply, completion.tokens), **self._ending(completion)}

    def _object(self, reply: Reply, tokens: Sequence[Token] = ()) -> Json:
        """The object for a response or a piece of it."""
        text: Json = {"content" if self.parsed.is_chat else "response": reply.text}
        if reply.reasoning:
            text["thinking"] = reply.reasoning
        if reply.calls:
            text["tool_calls"] = [
                {"function": {"index": index, "name": call.name, "arguments": call.values}}
                for index, call in enumerate(reply.calls)
            ]
        if self.parsed.is_chat:
            text = {"message": {"role": "assistant", **text}}
        if tokens and "logprobs" in self.parsed.settings:
            text["logprobs"] = replies.chat_logprobs(tokens, self.model.tokenizer)["content"]
        return {"model": self.model.name, "created_at": now(), **text, "done": False}

    def _ending(self, completion: Generation) -> Json:
        speed, now_ = completion.speed, time.perf_counter()
        read, generated = len(completion.prompt_ids), len(completion.ids)
        rate = speed.decode_tokens_per_second
        return {
            "done": True,
            "done_reason": FINISHES[completion.finish_reason],
            "total_duration": nanoseconds(now_ - self.parsed.began),
            "load_duration": nanoseconds(self._ready - self.parsed.began),
            "prompt_eval_count": read,
            "prompt_eval_duration": nanoseconds(speed.seconds_to_first_token),
            "eval_count": generated,
            "eval_duration": nanoseconds(generated / rate if rate else 0.0),
            **warnings_of(self.parsed.warnings),
        }

    def start(self, index: int, completion: Generation) -> Iterable[bytes]:
        self._stream = ReplyStream(self.model, self.parsed, completion)
        return ()

    def token(self, index: int, token: Token) -> Iterable[bytes]:
        tokens = [token] if "logprobs" in self.parsed.settings else []
        for part in self._stream.add(token):
            for piece in self._pieces(part):
                yield _line(self._object(piece, tokens))
                tokens = []
        if tokens:
            yield _line(self._object(Reply("", "", (), "stop"), tokens))

    def finish(self, index: int, completion: Generation) -> Iterable[bytes]:
        for part in self._stream.end(completion)[0]:
            for piece in self._pieces(part):
                yield _line(self._object(piece))
        for piece in self._finished_call():
            yield _line(self._object(piece))
        yield _line({**self._object(Reply("", "", (), "stop")), **self._ending(completion)})

    def end(self, completions: Sequence[Generation]) -> Iterable[bytes]:
        return ()

    def failed(self, message: str) -> Iterable[bytes]:
        yield _line({"error": message})

    def _pieces(self, part: ReplyPart) -> Iterable[Reply]:
        """What can be sent after a part."""
        if part.call is None:
            yield Reply(part.reasoning, part.text, (), "stop")
            return
        call_id, delta = part.call
        if delta.name is not None:
            yield from self._finished_call()
        self._call = _extended(self._call, call_id, delta)

    def _finished_call(self) -> Iterable[Reply]:
        call, self._call = self._call, None
        if call is not None:
            yield Reply("", "", (call,), "stop")


def _extended(call: ReplyCall | None, call_id: str, delta: CallDelta) -> ReplyCall:
    before = "" if call is None else call.arguments
    name = delta.name or ("" if call is None else call.name)
    return ReplyCall(call_id, name, before + delta.arguments)


def _line(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


async def embed_reply(steps: TextSteps, parsed: OllamaEmbedding) -> Json:
    """The response of /api/embed, and of the older path."""
    ready = time.perf_counter()
    of = await steps.vectors(parsed.texts)
    if parsed.is_single:
        return {"embedding": of.vectors[0].tolist()}
    return {
        "model": steps.model.name,
        "embeddings": of.vectors.tolist(),
        "total_duration": nanoseconds(time.perf_counter() - parsed.began),
        "load_duration": nanoseconds(ready - parsed.began),
        "prompt_eval_count": of.tokens,
    }
