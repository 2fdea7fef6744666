"""What comes out of a model: tokens as they stream, the finished answer, and how fast it went."""

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
    """Timings of one answer; rates are tokens a second, zero where nothing was measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    seconds_to_first_token: float = 0.0
    prompt_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    gigabytes_per_second: float = 0.0
    gpu_experts: float | None = None
    """The share of the experts in use that the GPU computed; None: they aren't divided."""
    accepted_share: float | None = None
    """Drafted tokens that stood; None: nothing was drafted."""
    tokens_per_pass: float | None = None
    """Tokens that a pass of the model gave, with drafts and without."""
    speculation_gain: float | None = None
    """Tokens a second over what they would be without drafts, by what a pass of one token takes."""

    def side_by_side(self, rows: float) -> "Speed":
        """The speed where a pass gave a token each to so many answers, and read the weights once for all."""
        return replace(self, tokens_per_pass=rows, gigabytes_per_second=self.gigabytes_per_second / rows)


@dataclass(frozen=True)
class Generation:
    """A finished answer."""

    text: str
    ids: list[int]
    finish_reason: FinishReason
    speed: Speed
    prompt_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    mean_logprob: float | None = None
    """Log-probability a token, by which the best of several answers is told; None: it wasn't asked for."""
    dropped_turns: int = 0
    """Oldest chat turns that were left out because the conversation outgrew the context."""
    slides: int = 0
    """How often the context was full while the answer came, and tokens in its middle were left out."""
    left_out_tokens: int = 0
    """Tokens of prompt and answer that were left out so by the end."""
