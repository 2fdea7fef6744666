"""The line after a completion: its speed; with --speed also that of the prompt, drafting and context use."""

from typing import TYPE_CHECKING

from edgeinfer_tui.output.progress_line import shown_time

if TYPE_CHECKING:
    from edgeinfer.results import Generation

ENDINGS = {
    "length": "stopped at --max-tokens",
    "cancelled": "stopped by you",
}


def short_status_line(completion: "Generation") -> str:
    """For example: 54 tokens/s, first token 0.2 s."""
    speed = completion.speed
    first = speed.seconds_to_first_token
    parts = [f"first token {first:.1f} s" if 0.05 <= first < 10 else f"first token {shown_time(first, True)}"]
    if speed.decode_tokens_per_second > 0:
        parts.insert(0, f"{_number(speed.decode_tokens_per_second)} tokens/s")
    if completion.finish_reason in ENDINGS:
        parts.append(ENDINGS[completion.finish_reason])
    return ", ".join(parts)


def status_line(completion: "Generation", context: int, joules: float | None = None) -> str:
    """For example: ttft 0.21 s · prompt 312 t/s (9 tokens) · decode 54 t/s (128 tokens) · context
    137/1024.

    `joules`: energy of the completion with its prompt; None: unknown.
    """
    speed = completion.speed
    read = speed.prompt_tokens - speed.cached_tokens
    cached = f", {speed.cached_tokens} cached" if speed.cached_tokens else ""
    parts = [
        f"ttft {shown_time(speed.seconds_to_first_token, exact=True)}",
        f"prompt {_rate(speed.prompt_tokens_per_second)} ({_tokens(read)}{cached})",
        f"decode {_rate(speed.decode_tokens_per_second)} ({_tokens(speed.generated_tokens)})",
    ]
    if speed.gigabytes_per_second:
        parts.append(f"{speed.gigabytes_per_second:.1f} GB/s")
    if speed.gpu_experts is not None:
        parts.append(f"{speed.gpu_experts:.0%} of experts on the GPU")
    if speed.accepted_share is not None:
        parts.append(f"draft accepted {speed.accepted_share:.0%}")
    if speed.tokens_per_forward is not None:
        parts.append(f"{speed.tokens_per_forward:.1f} tokens per forward")
    if speed.speculation_gain is not None:
        parts.append(f"drafts gained {round(100 * (speed.speculation_gain - 1)):+d}%")
    if joules is not None and speed.generated_tokens:
        parts.append(f"{joules / speed.generated_tokens:.3g} J per token")
    parts.append(f"context {context_used(completion)}{of_context(context)}")
    if completion.evicted_tokens:
        parts.append(
            f"shifted {_times(completion.context_shifts)}, {completion.evicted_tokens} tokens evicted"
        )
    if completion.finish_reason in ENDINGS:
        parts.append(ENDINGS[completion.finish_reason])
    return " · ".join(parts)


def of_context(context: int) -> str:
    """The context after a number of tokens; "" for 0: it is unknown."""
    return f"/{context}" if context else ""


def context_used(completion: "Generation") -> int:
    """Tokens of prompt and completion in the KV cache, without the evicted ones."""
    if completion.evicted_tokens:
        return len(completion.prompt_ids) + len(completion.ids) - completion.evicted_tokens
    return completion.speed.prompt_tokens + completion.speed.generated_tokens


def context_lines(completion: "Generation", context: int) -> list[str]:
    """Messages for a text that exceeded the context; none if it didn't."""
    lines = (
        dropped_messages_line(completion, context),
        _shift_line(completion, context),
        full_line(completion, context),
    )
    return [line for line in lines if line]


def full_line(completion: "Generation", context: int) -> str | None:
    """Message for a completion that ended because the context is full, else None."""
    if completion.finish_reason != "context":
        return None
    return f"the context{_sized(context)} is full: the completion ends here"


def dropped_messages_line(completion: "Generation", context: int) -> str | None:
    """Message for a chat whose oldest messages were dropped, else None."""
    count = completion.dropped_messages
    if count == 0:
        return None
    messages = "oldest message was" if count == 1 else f"{count} oldest messages were"
    return f"the conversation exceeded the context{_sized(context)}: the {messages} dropped"


def _sized(context: int) -> str:
    return f" of {context} tokens" if context else ""


def _shift_line(completion: "Generation", context: int) -> str | None:
    if not completion.evicted_tokens:
        return None
    return (
        f"the text exceeded the context of {context} tokens and was shifted "
        f"{_times(completion.context_shifts)}: "
        f"{completion.evicted_tokens} tokens after the first were evicted"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _rate(tokens_per_second: float) -> str:
    if tokens_per_second <= 0:
        return "- t/s"
    return f"{_number(tokens_per_second)} t/s"


def _number(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second < 10 else f"{tokens_per_second:.0f}"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
