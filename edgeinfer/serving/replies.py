"""Response objects of OpenAI's API."""

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.responses import JSONResponse

from edgeinfer.chat_templates.tool_calls import ParsedReply
from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.ranking import RankedText
from edgeinfer.results import Generation, Token

FINISHES = {"stop": "stop", "length": "length", "context": "length", "cancelled": "stop"}


def new_id(prefix: str) -> str:
    """For example `chatcmpl-1f0c…`."""
    return f"{prefix}-{secrets.token_hex(12)}"


def usage(completions: Sequence[Generation]) -> dict[str, Any]:
    """Prompt, cached and completion tokens."""
    read = sum(len(completion.prompt_ids) for completion in completions)
    generated = sum(len(completion.ids) for completion in completions)
    cached = sum(completion.speed.cached_tokens for completion in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": generated,
        "total_tokens": read + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings(completion: Generation) -> dict[str, Any]:
    """Timings of the completion."""
    speed = completion.speed
    return {
        "seconds_to_first_token": speed.seconds_to_first_token,
        "prompt_tokens_per_second": speed.prompt_tokens_per_second,
        "decode_tokens_per_second": speed.decode_tokens_per_second,
        "accepted_share": speed.accepted_share,
    }


def chat_message(parsed: ParsedReply) -> dict[str, Any]:
    """The assistant's message."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parsed.content or (None if parsed.calls else ""),
    }
    if parsed.calls:
        message["tool_calls"] = tool_calls(parsed)
    return message


def tool_calls(parsed: ParsedReply) -> list[dict[str, Any]]:
    """The tool calls of a response, in the format of messages."""
    return [
        {
            "id": new_id("call"),
            "index": index,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for index, call in enumerate(parsed.calls)
    ]


def finish(completion: Generation, parsed: ParsedReply | None = None) -> str:
    """The finish reason."""
    return "tool_calls" if parsed and parsed.calls else FINISHES[completion.finish_reason]


def chat_logprobs(tokens: Sequence[Token], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities in the format of chat completions."""

    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            {**one(token.id, token.logprob), "top_logprobs": [one(*each) for each in token.top_logprobs]}
            for token in tokens
        ]
    }


def text_logprobs(tokens: Sequence[Token], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities in the format of text completions."""

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    offsets = np.cumsum([0, *(len(token.text) for token in tokens)])[:-1]
    return {
        "tokens": [text(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{text(i): logprob for i, logprob in token.top_logprobs} for token in tokens],
        "text_offset": [int(offset) for offset in offsets],
    }


def embeddings(model: str, vectors: npt.NDArray[np.float32], tokens: int, as_base64: bool) -> dict[str, Any]:
    """The response of /v1/embeddings."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "model": model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def ranking(model: str, texts: Sequence[RankedText], tokens: int, with_texts: bool) -> dict[str, Any]:
    """The response of /v1/rerank."""
    results = [
        {
            "index": each.index,
            "relevance_score": each.score,
            **({"document": {"text": each.text}} if with_texts else {}),
        }
        for each in texts
    ]
    return {
        "object": "list",
        "model": model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """A response with an error object."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(error(message, kind, param, code), status_code=status)


def event(data: Mapping[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
