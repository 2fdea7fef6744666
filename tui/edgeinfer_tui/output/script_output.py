"""Completions for programs: one JSON object per line, with usage and timings."""

import json
from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

from edgeinfer_tui.failures import one_line
from edgeinfer_tui.library import Stream
from edgeinfer_tui.output.progress_line import ProgressLine
from edgeinfer_tui.text_files import MAX_TEXT_BYTES, decoded, read_bounded

if TYPE_CHECKING:
    from edgeinfer.results import Generation


def collected(stream: Stream, progress: ProgressLine) -> "Generation":
    """The whole completion; Ctrl-C ends generation and keeps the text so far."""
    try:
        for _ in stream:
            progress.erase()
    except KeyboardInterrupt:
        stream.cancel()
    finally:
        progress.erase()
    return stream.result


def completion_record(completion: "Generation", model: str, prompt: str) -> dict[str, Any]:
    """One completion with its usage in tokens and its timings in seconds."""
    speed = completion.speed
    record: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": speed.prompt_tokens,
            "cached_tokens": speed.cached_tokens,
            "generated_tokens": speed.generated_tokens,
        },
        "timings": {
            "seconds_to_first_token": speed.seconds_to_first_token,
            "prompt_tokens_per_second": speed.prompt_tokens_per_second,
            "decode_tokens_per_second": speed.decode_tokens_per_second,
            "accepted_share": speed.accepted_share,
        },
    }
    if completion.evicted_tokens:
        record["usage"] |= {
            "context_shifts": completion.context_shifts,
            "evicted_tokens": completion.evicted_tokens,
        }
    if any(token.logprob is not None for token in completion.tokens):
        record["logprobs"] = [
            {"id": token.id, "text": token.text, "logprob": token.logprob, "top": list(token.top_logprobs)}
            for token in completion.tokens
        ]
    return record


def print_record(completion: "Generation", model: str, prompt: str) -> None:
    """Print the record on a line of stdout and flush."""
    print(json.dumps(completion_record(completion, model, prompt), ensure_ascii=False), flush=True)


def print_failure(error: Exception, model: str, prompt: str) -> None:
    """Print a record with the error instead of a completion."""
    failure = {"model": model, "prompt": prompt, "error": one_line(error)}
    print(json.dumps(failure, ensure_ascii=False), flush=True)


def prompts_by_line(raw: BinaryIO) -> Iterator[str]:
    """Non-empty lines of piped text as they arrive. Raises `BadParameter`: too long or not UTF-8."""
    lines = iter(lambda: raw.readline(MAX_TEXT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        name = f"standard input, line {number}"
        text = decoded(read_bounded(BytesIO(line), name), name).rstrip("\r\n")
        if text.strip():
            yield text
