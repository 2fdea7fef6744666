"""A draft head of a model with tensor parallel: it is in the process of one rank, which has all states."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_offload.runtime.tensor_backend import KeptRows, TensorBackend, TensorStates

Candidates = list[tuple[int, float]]
"""The most probable tokens after one, and their probabilities, falling."""


@dataclass(frozen=True)
class HeadReady:
    """What a rank returns when it has loaded a head. `batch`: maximum tokens of its steps; `heads`: of Medusa
    heads their number.
    """

    nbytes: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    batch: int = 0
    heads: int = 0


class TensorHead:
    """The head on a rank of `target`, with those methods of a `Backend`, or of Medusa heads, that drafting on
    a GPU calls. `job`: what the ranks load.
    """

    def __init__(self, target: TensorBackend, rank: int, job: Any) -> None:
        self._target, self._rank = target, rank
        self._offset = 0
        """From the positions of the head's text to those of the target's."""
        ready: HeadReady = target.call_rank(rank, "load_head", job)
        self.nbytes, self.capabilities = ready.nbytes, ready.capabilities
        self.batch, self.heads = ready.batch, ready.heads

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._target.call_rank(self._rank, "call_head", method, *arguments)

    def set_hidden(self, states: KeptRows, start: int) -> None:
        """As `Backend.set_hidden`, for rows of `TensorBackend.kept_rows`."""
        self._offset = states.first - start

    def embed(self, ids: Sequence[int]) -> TensorStates:
        """As `Backend.embed`."""
        return TensorStates(tuple(ids))

    def forward(self, x: TensorStates, start: int) -> None:
        """As `Backend.forward`."""
        self._call("forward", list(x.ids), start, self._offset)

    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`."""
        drafted: DraftedTokens = self._call("draft", list(ids), start, self._offset, request)
        return drafted

    def draft_level(
        self, ids: Sequence[int], start: int, parents: Sequence[int], count: int, power: float
    ) -> list[Candidates]:
        """As `Backend.draft_level`."""
        found: list[Candidates] = self._call(
            "draft_level", list(ids), start, self._offset, list(parents), count, power
        )
        return found

    def candidates(self, states: KeptRows, heads: int, count: int, power: float) -> list[Candidates]:
        """Those of Medusa heads for one state."""
        found: list[Candidates] = self._call("candidates", states.first, heads, count, power)
        return found

    def close(self) -> None:
        """Free the memory on the rank's GPU."""
        with contextlib.suppress(BackendError):  # The ranks may have ended with the model.
            self._target.call_rank(self._rank, "close_head")
