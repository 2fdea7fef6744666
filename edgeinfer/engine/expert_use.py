"""Where the experts of a completion were computed, for an engine that splits them."""

from typing import Protocol, runtime_checkable

from edgeinfer.engine.protocols import Engine


@runtime_checkable
class DividesExperts(Protocol):
    """An engine with experts on two devices."""

    @property
    def expert_pairs(self) -> tuple[int, int]:
        """Total number of token-expert assignments, and how many of them the CPU computed."""
        ...


class ExpertUse:
    """The engine's expert counts since this object was created."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._pairs()

    def _pairs(self) -> tuple[int, int]:
        return self._engine.expert_pairs if isinstance(self._engine, DividesExperts) else (0, 0)

    @property
    def gpu_share(self) -> float | None:
        """The share of token-expert assignments computed on the GPU; None: experts aren't split."""
        seen, here = (now - then for now, then in zip(self._pairs(), self._before, strict=True))
        return 1 - here / seen if seen else None
