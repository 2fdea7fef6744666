"""Results of generation: streamed tokens, the completion, and its speed."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
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

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and completion that are in the context at its end."""
        return len(self.prompt_ids) + len(self.ids) - self.evicted_tokens

    def __str__(self) -> str:
        return self.text


def majority(
    completions: Sequence[Generation], answer: Callable[[str], Any] = str.strip
) -> tuple[Any, float]:
    """The most frequent answer among completions of one prompt (the earliest one of equally frequent ones)
    and its share of all answers: self-consistency (Wang et al. 2022).

    `answer`: text -> what is compared, such as a number in it; None: the completion isn't counted.

    Raises:
        ValueError: no completion has an answer.
    """
    counts = Counter(found for found in (answer(one.text) for one in completions) if found is not None)
    if not counts:
        raise ValueError(f"majority: saw {len(completions)} completions, wanted at least one with an answer")
    ((most_frequent, count),) = counts.most_common(1)
    return most_frequent, count / counts.total()
