"""Drafting with a Gemma 4 assistant on the GPU of its target, which makes a whole draft there."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.recent_states import RecentStatesDrafter
from edgeinfer_kernels import draft_loop
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftSampling


class AssistantDrafts(Protocol):
    """The assistant on a device."""

    def draft(self, token: int, states: Any, request: draft_loop.DraftRequest) -> DraftedTokens:
        """The most probable tokens after one, with the target's state before it."""
        ...

    def close(self) -> None: ...


class DeviceAssistant(RecentStatesDrafter):
    """The assistant on `backend`, for the text of `target`. As those of `DeviceHead`, draft tokens are the
    most probable ones, whatever the sampling parameters.
    """

    name = "assistant"

    def __init__(
        self,
        backend: AssistantDrafts,
        target: NativeEngine,
        nbytes: int,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(backend, target, nbytes, on_close)
        self._id_limit = target.vocabulary_size

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """As `Drafter.propose`."""
        count = request.max_tokens
        state = self._states.before_last(history) if count else None
        if state is None:
            return Draft()
        own = draft_loop.DraftRequest(
            [request.min_prob] * count,
            [request.min_prob_to_continue] * count,
            self._id_limit,
            DraftSampling(),
        )
        drafted = self._backend.draft(history[-1], state, own)
        return Draft(tuple(drafted.ids), probs=tuple(drafted.probs))
