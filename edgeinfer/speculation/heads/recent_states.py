"""The hidden states at the last tokens of a text, for drafters that read a single one."""

from collections.abc import Callable, Sequence
from typing import Any

from edgeinfer.engine.hidden_states import ON_DEVICE, HiddenStep
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.heads.observed_states import (
    SPARE_STATES,
    KeptStates,
    ObservedStates,
    ObservedText,
)

KEPT_STATES = 2 * (1 + MAX_DRAFTED)
"""The last states of the text, from which a draft may begin."""


class RecentStates:
    """Those after the output norm of `target`, which stay on its device if it keeps them there.

    `layers`: as `Drafter.hidden_layers`.
    """

    def __init__(self, target: NativeEngine) -> None:
        spec, kept = target.specification, target.capabilities.kept_states
        self.layers = (ON_DEVICE,) if kept else (len(spec.layers),)
        self._observed: ObservedText = (
            KeptStates(kept - SPARE_STATES, target.backend.kept_rows)
            if kept
            else ObservedStates(KEPT_STATES, spec.hidden_size, target.backend.write_draft_states)
        )

    def observe(self, step: HiddenStep) -> None:
        """As `Drafter.observe`: keep the last states."""
        self._observed.begin(step)
        for ids, states in step.parts(KEPT_STATES // 2):
            if len(ids) > self._observed.free:
                self._observed.drop(self._observed.end - KEPT_STATES // 2)
            self._observed.add(ids, states)

    def before_last(self, history: Sequence[int]) -> Any:
        """The state at the token before the last one of a text; None: it isn't known."""
        last = self._observed.last_before(history)
        return None if last is None else self._observed.states(last, last + 1)


class RecentStatesDrafter(Drafter):
    """A drafter on `backend`, which it owns, that begins each draft with a recent state of `target`."""

    def __init__(
        self, backend: Any, target: NativeEngine, nbytes: int, on_close: Callable[[], None] | None
    ) -> None:
        self._backend, self._nbytes, self._on_close = backend, nbytes, on_close
        self._states = RecentStates(target)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._states.layers

    def observe(self, step: HiddenStep) -> None:
        """As `Drafter.observe`."""
        self._states.observe(step)

    def close(self) -> None:
        self._backend.close()
        if self._on_close:
            self._on_close()
