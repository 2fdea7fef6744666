"""Results of generation: streamed tokens, the completion, and its speed."""

from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One token of a stream. `text` may be empty while a UTF-8 character is incomplete."""

    id: int
    text: str
    drafted: bool = False
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Speed:
    """Timings of one completion; rates are tokens per second, zero if nothing was measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds_to_first_token: float = 0.0
    prompt_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    gigabytes_per_second: float = 0.0
    gpu_experts: float | None = None
    """Share of the routed experts that the GPU computed; None: the experts aren't split."""
    accepted_share: float | None = None
    """Share of draft tokens that were accepted; None: no drafts."""
    tokens_per_forward: float | None = None
    """Tokens per forward of the model, with and without drafts."""
    speculation_gain: float | None = None
    """Tokens per second relative to the rate without drafts, measured last."""

    def side_by_side(self, rows: float) -> "Speed":
        """The speed of a batch in which each forward gave one token to `rows` completions."""
        return replace(self, tokens_per_forward=rows, gigabytes_per_second=self.gigabytes_per_second / rows)


@dataclass(frozen=True)
class Generation:
    """A finished completion."""

    text: str
    ids: list[int]
    finish_reason: FinishReason
    speed: Speed
    prompt_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    mean_logprob: float | None = None
    """Mean log-probability per token, used to select the best of several completions; None: not requested."""
    dropped_messages: int = 0
    """Oldest chat messages dropped because the chat exceeded the context."""
    context_shifts: int = 0
    """Number of context shifts during generation."""
    evicted_tokens: int = 0
    """Tokens of prompt and completion evicted by context shifts."""
