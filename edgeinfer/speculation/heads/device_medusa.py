"""Drafting with Medusa heads on the GPU of their target, which finds the candidates of all heads at once."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.recent_states import RecentStatesDrafter
from edgeinfer.speculation.trees.tree_growth import Candidates, grow_levels


class MedusaCandidates(Protocol):
    """The heads on a device."""

    @property
    def heads(self) -> int:
        """Their number."""
        ...

    def candidates(self, states: Any, heads: int, count: int, power: float) -> list[Candidates]:
        """The `count` most probable tokens of each of the first heads, for one state of the target."""
        ...

    def close(self) -> None: ...


class DeviceMedusa(RecentStatesDrafter):
    """The heads on `backend`, for the text of `target`. As those of `DeviceHead`, draft tokens are the most
    probable ones, whatever the sampling parameters except the temperature.
    """

    name = "Medusa heads"
    tree_width: int = 1

    def __init__(
        self,
        backend: MedusaCandidates,
        target: NativeEngine,
        nbytes: int,
        tree_width: int = 1,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(backend, target, nbytes, on_close)
        self.tree_width = tree_width

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`; no more levels than there are heads."""
        levels, is_tree = min(request.max_tokens, self._backend.heads), request.max_nodes > 0
        state = self._states.before_last(history) if levels else None
        if state is None:
            return Draft()
        power = request.sharpness / (request.params.temperature or 1.0) if is_tree else 1.0
        width = self.tree_width if is_tree else 1
        return grow_levels(request, width, self._backend.candidates(state, levels, width, power))
