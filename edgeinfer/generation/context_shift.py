"""Context shift: which tokens stay in the KV cache when the context is full. The first and the last tokens
stay; optionally also those in between with the highest attention scores.

The first tokens act as attention sinks; without them the model's output degrades badly.
Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; Zhang et al. 2023, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError, shown

SINKS = 4
"""Minimum number of first tokens that are kept."""
MIN_CONTEXT = 64
STEP = 16
"""The number of evicted tokens is a multiple of this."""
SCORING_TOKENS = 32
"""Number of last tokens whose attention scores are summed."""


@dataclass(frozen=True)
class ContextShift:
    """Keep the first `keep` tokens, at most half of the context, and as many of the last ones as fit.

    The evicted tokens depend only on the length of the text.
    """

    keep: int
    context: int

    @classmethod
    def requested(cls, context_overflow: str, keep: int, engine: Engine) -> "ContextShift | None":
        """The policy named `context_overflow`; None: generation stops when the context is full.

        Raises:
            SettingError: it is not supported here.
        """
        policy = POLICIES[context_overflow]
        if policy is None:
            return None
        if not engine.capabilities.can_evict:
            raise SettingError(
                f"context_overflow: saw {shown(context_overflow)}, but tokens can't be evicted from "
                f"{engine.capabilities.unevictable}; take 'stop'"
            )
        if policy is HeavyHitters and not engine.capabilities.has_attention_scores:
            raise SettingError(
                "context_overflow: h2o needs attention scores of the CPU for all layers (device='cpu'); "
                "or take 'shift'"
            )
        if engine.context < MIN_CONTEXT or keep > engine.context // 2:
            raise SettingError(
                f"context_overflow: {keep} first tokens stay (the system prompt, {SINKS} at least), and the "
                f"context holds {engine.context}; wanted a context of at least {max(MIN_CONTEXT, 2 * keep)}"
            )
        return policy(keep, engine.context)

    @property
    def step(self) -> int:
        """Number of tokens evicted at a time: a quarter of the context, so that shifts are rare."""
        return self.context // 4 // STEP * STEP

    def left_out(self, length: int) -> int:
        """Number of tokens that are evicted from a text of this length."""
        return max(0, -(-(length - self.context) // self.step) * self.step)

    def remaining_ids(self, ids: Sequence[int], left_out: int) -> list[int]:
        """A text without the `left_out` tokens after the kept first ones."""
        return [*ids[: self.keep], *ids[self.keep + left_out :]]

    def begin(self, engine: Engine, ids: Sequence[int]) -> list[int]:
        """Prepare the engine for a text and return the ids that its cache is to hold. The cached prefix is
        reused, unless more of it was evicted than necessary, and tokens are evicted to make space. A text
        that is still too long loses its middle.
        """
        held = engine.reusable(engine.cached_of(shared_prefix(engine.text, ids)))
        engine.rewind(held)
        if engine.first_evicted is not None and len(engine.text) - held > self.left_out(len(ids)):
            held = engine.reusable(engine.first_evicted)
            engine.rewind(held)
        remainder = ids[len(engine.text) :]
        excess = self.left_out(held + len(remainder))
        if excess > held - self.keep:
            engine.rewind(engine.reusable(min(held, self.keep)))
            return self.remaining_ids(ids, self.left_out(len(ids)))
        if excess:
            engine.evict(self.tokens_to_evict(engine, excess))
        return [*engine.ids, *remainder]

    def shorten(self, engine: Engine, history: Sequence[int]) -> list[int]:
        """A history that has reached the context limit, shortened by one step."""
        if not engine.capabilities.can_evict or engine.ids != history[:-1]:
            return self.remaining_ids(history, self.step)
        engine.evict(self.tokens_to_evict(engine, self.step))
        return [*engine.ids, history[-1]]

    def tokens_to_evict(self, engine: Engine, count: int) -> Sequence[int]:
        """The indices of the `count` cached tokens to evict."""
        return range(self.keep, self.keep + count)


class HeavyHitters(ContextShift):
    """Keep the first tokens, the last quarter of the context, and the tokens in between with the highest
    attention scores from the last `SCORING_TOKENS` tokens.
    """

    def tokens_to_evict(self, engine: Engine, count: int) -> Sequence[int]:
        """The tokens with the lowest scores; if there are too few in between, the oldest."""
        last = len(engine.ids) - self.context // 4
        if last - self.keep < count:
            return super().tokens_to_evict(engine, count)
        scores = engine.attention_scores(SCORING_TOKENS)[self.keep : last]
        return sorted((self.keep + np.argsort(scores, kind="stable")[:count]).tolist())


POLICIES: dict[str, type[ContextShift] | None] = {
    "stop": None,
    "shift": ContextShift,
    "h2o": HeavyHitters,
}
"""Policies by name."""


def shared_with(engine: Engine, ids: Sequence[int], is_shifted: bool = False) -> int:
    """Length of the cached prefix of a text. Counts only tokens processed before any eviction, unless
    `is_shifted`: tokens of the text were omitted from `ids`.
    """
    shared = shared_prefix(engine.ids, ids)
    if not is_shifted and engine.first_evicted is not None:
        return min(shared, engine.first_evicted)
    return shared
