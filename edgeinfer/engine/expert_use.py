"""Where the experts that an answer asked for were computed, for an engine that divides them."""

from typing import Protocol, runtime_checkable

from edgeinfer.engine.protocols import Engine


@runtime_checkable
class DividesExperts(Protocol):
    """An engine whose experts lie on two devices."""

    @property
    def expert_pairs(self) -> tuple[int, int]:
        """How many experts tokens have asked for so far, and how many of them were the CPU's."""
        ...


class ExpertUse:
    """What an engine's counts say of the time since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._pairs()

    def _pairs(self) -> tuple[int, int]:
        return self._engine.expert_pairs if isinstance(self._engine, DividesExperts) else (0, 0)

    @property
    def gpu_share(self) -> float | None:
        """The share of the experts that the GPU computed; None: none are divided."""
        seen, here = (now - then for now, then in zip(self._pairs(), self._before, strict=True))
        return 1 - here / seen if seen else None
