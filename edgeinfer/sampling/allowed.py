"""What may follow at all, whatever the model would like."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

MUCH_ALLOWED = 2
"""Where one of so many tokens is allowed, none is looked at apart from the others."""


class Constraint(Protocol):
    """What may follow, token by token."""

    def begin(self) -> None:
        """`allowed` will be asked for soon: it may be found meanwhile."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next."""
        ...

    def few(self) -> Ids | None:
        """The tokens that may come next, rising; None: so many that `allowed` says it quicker."""
        ...

    def allowed(self) -> npt.NDArray[np.bool_]:
        """(vocabulary,) the tokens that may come next, one at least."""
        ...

    def in_time(self, token_id: int) -> int:
        """The sampled token, or another one where the answer has to come to its end."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was kept."""
        ...


def allowed_of(logits: Logits, constraint: Constraint) -> tuple[Ids | None, Logits]:
    """The logits of the tokens that may follow, with their ids where they are few; else the logits of all
    tokens, -inf where one may not follow. Where little may follow, no sampler need look at all that may not.
    """
    ids = constraint.few()
    if ids is None:
        allowed = constraint.allowed()
        if not 0 < MUCH_ALLOWED * np.count_nonzero(allowed) < logits.size:
            return None, np.where(allowed, logits, np.float32(-np.inf))
        ids = np.flatnonzero(allowed)
    return ids, logits[ids]
