"""What a text keeps of itself once it outgrows the context: its first tokens, and its last.

The first ones are where attention goes that has nowhere else to go; without them a model falls apart.
Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from edgeinfer.errors import SettingError
from edgeinfer.kv_cache import shared_prefix
from edgeinfer.language_model import Engine

OnFull = Literal["stop", "slide"]
SINKS = 4
"""First tokens that are kept at least."""
LEAST_CONTEXT = 64
STEP = 16
"""What is left out at a time is a multiple of so many tokens."""


@runtime_checkable
class SlidingEngine(Protocol):
    """An engine that can forget tokens in the middle of what it holds."""

    @property
    def slid_at(self) -> int | None:
        """How many first tokens were read with all tokens before them in place; None: all were."""
        ...

    def slide(self, keep: int, count: int) -> None:
        """Forget `count` tokens, a multiple of STEP, behind the first `keep`; those behind them move up."""
        ...


@dataclass(frozen=True)
class Sliding:
    """Keep the first `keep` tokens, half of the context at most, and of the others the last that fit.

    What is left out of a text depends on its length alone, so that its next turn finds in the cache what
    this one left there.
    """

    keep: int
    context: int

    @classmethod
    def wanted(cls, on_full: str, keep: int, engine: Engine) -> "Sliding | None":
        """What `on_full` asks for; None: the answer ends where the context does.

        Raises:
            SettingError: it is neither, or can't be done here.
        """
        if on_full not in ("stop", "slide"):
            raise SettingError(f"on_full: saw {on_full!r}, wanted 'stop' or 'slide'")
        if on_full == "stop":
            return None
        if not isinstance(engine, SlidingEngine):
            raise SettingError(
                "on_full: saw 'slide', which llama.cpp's cache doesn't do here; leave the engine out, "
                "or take 'stop'"
            )
        if engine.context < LEAST_CONTEXT or keep > engine.context // 2:
            raise SettingError(
                f"on_full: {keep} first tokens stay (the system message, {SINKS} at least), and the context "
                f"holds {engine.context}; wanted a context of at least {max(LEAST_CONTEXT, 2 * keep)}"
            )
        return cls(keep, engine.context)

    @property
    def step(self) -> int:
        """Tokens that are left out at a time: a quarter of the context, so that it is rarely done."""
        return self.context // 4 // STEP * STEP

    def left_out(self, length: int) -> int:
        """How many tokens of a text of this length are left out."""
        return max(0, -(-(length - self.context) // self.step) * self.step)

    def rest(self, ids: Sequence[int], left_out: int) -> list[int]:
        """The text without them."""
        return [*ids[: self.keep], *ids[self.keep + left_out :]]

    def begin(self, engine: Engine, ids: Sequence[int]) -> list[int]:
        """What the engine is to hold of a text; if it holds the text with less left out, it slides."""
        assert isinstance(engine, SlidingEngine)
        left_out = self.left_out(len(ids))
        wanted = self.rest(ids, left_out)
        held = shared_with(engine, wanted, left_out > 0)
        for less in range(self.step, min(left_out, self.context) + 1, self.step):
            other = self.rest(ids, left_out - less)
            shared = shared_with(engine, other, left_out > less)
            if shared - less > max(held, self.keep):
                engine.rewind(shared)
                engine.slide(self.keep, less)
                break
        return wanted


def shared_with(engine: Engine, ids: Sequence[int], slid: bool = False) -> int:
    """How many first tokens of a text the engine holds; if these have all been left in place, unless `slid`
    says that tokens of the text were left out of `ids`.
    """
    shared = shared_prefix(engine.ids, ids)
    if not slid and isinstance(engine, SlidingEngine) and engine.slid_at is not None:
        return min(shared, engine.slid_at)
    return shared
