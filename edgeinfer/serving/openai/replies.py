"""Response objects of OpenAI's API."""

import base64
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.ranking import RankedText
from edgeinfer.results import Generation, Token


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
