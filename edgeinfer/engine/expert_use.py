"""Where the experts of a completion were computed, for an engine that splits them."""

from edgeinfer.engine.protocols import Engine


class ExpertUse:
    """The engine's expert counts since this object was created."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.expert_counts

    @property
    def gpu_share(self) -> float | None:
        """The share of token-expert assignments computed on the GPU; None: experts aren't split."""
        counts = zip(self._engine.expert_counts, self._before, strict=True)
        seen, on_cpu = (now - then for now, then in counts)
        return 1 - on_cpu / seen if seen else None
