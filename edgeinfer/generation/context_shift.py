"""What a text keeps of itself once it outgrows the context: its first tokens, its last, and if asked for, of
those between them the ones that the last look at most.

The first ones are where attention goes that has nowhere else to go; without them a model falls apart.
Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; Zhang et al. 2023, "H2O:
Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError
from edgeinfer.shown import shown

OnFull = Literal["stop", "slide", "heavy-hitters"]
SINKS = 4
"""First tokens that are kept at least."""
MIN_CONTEXT = 64
STEP = 16
"""What is left out at a time is a multiple of so many tokens."""
VOTERS = 32
"""Last tokens that say by their attention which others stay."""


@runtime_checkable
class ShiftingEngine(Engine, Protocol):
    """An engine that can forget tokens in the middle of what it holds."""

    @property
    def can_vote(self) -> bool:
        """Whether it has `votes`."""
        ...

    @property
    def text(self) -> list[int]:
        """The tokens that it holds, with all that it has forgotten between them."""
        ...

    @property
    def slid_at(self) -> int | None:
        """How many first tokens were read with all tokens before them in place; None: all were."""
        ...

    def held_of(self, length: int) -> int:
        """How many tokens it holds of the first `length` of `text`."""
        ...

    def forget(self, gone: Sequence[int]) -> None:
        """Forget tokens at `gone` (rising places in `ids`); those behind them move up."""
        ...

    def votes(self, count: int) -> npt.NDArray[np.float64]:
        """(tokens held,): how much the last `count` tokens look at each; these are read once more."""
        ...


@dataclass(frozen=True)
class ContextShift:
    """Keep the first `keep` tokens, half of the context at most, and of the others the last that fit.

    What is left out of a text depends on its length alone.
    """

    keep: int
    context: int

    @classmethod
    def wanted(cls, on_full: str, keep: int, engine: Engine) -> "ContextShift | None":
        """What `on_full` asks for; None: the answer ends where the context does.

        Raises:
            SettingError: it is unknown, or can't be done here.
        """
        if not isinstance(on_full, str) or on_full not in POLICIES:
            raise SettingError(f"on_full: saw {shown(on_full)}, wanted {_either(POLICIES)}")
        policy = POLICIES[on_full]
        if policy is None:
            return None
        if not isinstance(engine, ShiftingEngine):
            raise SettingError(
                f"on_full: saw {shown(on_full)}, which llama.cpp's cache doesn't do here; leave the engine "
                "out, or take 'stop'"
            )
        if policy is HeavyHitters and not engine.can_vote:
            raise SettingError(
                "on_full: heavy hitters are found where the CPU computes all layers (--device cpu); "
                "or take 'slide'"
            )
        if engine.context < MIN_CONTEXT or keep > engine.context // 2:
            raise SettingError(
                f"on_full: {keep} first tokens stay (the system message, {SINKS} at least), and the context "
                f"holds {engine.context}; wanted a context of at least {max(MIN_CONTEXT, 2 * keep)}"
            )
        return policy(keep, engine.context)

    @property
    def step(self) -> int:
        """Tokens that are left out at a time: a quarter of the context, so that it is rarely done."""
        return self.context // 4 // STEP * STEP

    def left_out(self, length: int) -> int:
        """How many tokens of a text of this length are left out."""
        return max(0, -(-(length - self.context) // self.step) * self.step)

    def rest(self, ids: Sequence[int], left_out: int) -> list[int]:
        """A text without its first tokens behind those that stay."""
        return [*ids[: self.keep], *ids[self.keep + left_out :]]

    def begin(self, engine: Engine, ids: Sequence[int]) -> list[int]:
        """What the engine is to hold of a text: it goes on with what it has of its beginning, unless more of
        that is gone than has to be, and forgets what the text needs room for; a text too long even so goes
        without its middle.
        """
        assert isinstance(engine, ShiftingEngine)
        held = engine.held_of(shared_prefix(engine.text, ids))
        engine.rewind(held)
        if engine.slid_at is not None and len(engine.text) - held > self.left_out(len(ids)):
            held = engine.slid_at
            engine.rewind(held)
        rest = ids[len(engine.text) :]
        excess = self.left_out(held + len(rest))
        if excess > held - self.keep:
            engine.rewind(min(held, self.keep))
            return self.rest(ids, self.left_out(len(ids)))
        if excess:
            engine.forget(self.least_wanted(engine, excess))
        return [*engine.ids, *rest]

    def shorten(self, engine: Engine, history: Sequence[int]) -> list[int]:
        """A history that has outgrown the context, a step shorter."""
        if not (isinstance(engine, ShiftingEngine) and engine.ids == history[:-1]):
            return self.rest(history, self.step)
        engine.forget(self.least_wanted(engine, self.step))
        return [*engine.ids, history[-1]]

    def least_wanted(self, engine: ShiftingEngine, count: int) -> Sequence[int]:
        """The places of `count` tokens, of those that the engine holds, that go first."""
        return range(self.keep, self.keep + count)


class HeavyHitters(ContextShift):
    """Keep the first tokens, the last quarter of the context, and of those between them the ones that the
    last `VOTERS` look at most.
    """

    def least_wanted(self, engine: ShiftingEngine, count: int) -> Sequence[int]:
        """As told; where so many aren't between them, the oldest."""
        last = len(engine.ids) - self.context // 4
        if last - self.keep < count:
            return super().least_wanted(engine, count)
        votes = engine.votes(VOTERS)[self.keep : last]
        return sorted((self.keep + np.argsort(votes, kind="stable")[:count]).tolist())


POLICIES: dict[str, type[ContextShift] | None] = {
    "stop": None,
    "slide": ContextShift,
    "heavy-hitters": HeavyHitters,
}
"""By the names of `OnFull`."""


def _either(names: Iterable[str]) -> str:
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}"


def shared_with(engine: Engine, ids: Sequence[int], slid: bool = False) -> int:
    """How many first tokens of a text the engine holds; if these have all been left in place, unless `slid`
    says that tokens of the text were left out of `ids`.
    """
    shared = shared_prefix(engine.ids, ids)
    if not slid and isinstance(engine, ShiftingEngine) and engine.slid_at is not None:
        return min(shared, engine.slid_at)
    return shared
