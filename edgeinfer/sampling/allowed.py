"""Constraints on the next token, independent of the model's logits."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MUCH_ALLOWED = 2
"""If at least one in this many tokens is allowed, allowed tokens aren't gathered separately."""


class Constraint(Protocol):
    """The allowed tokens, updated token by token."""

    def begin(self) -> None:
        """Hint that `allowed` is called soon: it may be computed in the background."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether this token is allowed next."""
        ...

    def few(self) -> Ids | None:
        """The allowed tokens, rising; None: there are too many, and `allowed` is faster."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """(vocabulary,) mask of the allowed tokens; at least one is True."""
        ...

    def token_or_ending(self, token_id: int) -> int:
        """The sampled token, or another one if the completion has to end soon."""
        ...

    def accept(self, token_id: int) -> None:
        """Update with the accepted token."""
        ...


def allowed_of(logits: Logits, constraint: Constraint) -> tuple[Ids | None, Logits]:
    """If few tokens are allowed: their ids and their logits. Else None, and the logits of all tokens with
    -inf for disallowed ones. With few tokens, samplers skip all others.
    """
    ids = constraint.few()
    if ids is None:
        allowed = constraint.allowed()
        if not 0 < MUCH_ALLOWED * np.count_nonzero(allowed) < logits.size:
            return None, np.where(allowed, logits, np.float32(-np.inf))
        ids = np.flatnonzero(allowed)
    return ids, logits[ids]
