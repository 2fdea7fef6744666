"""Which experts a step's tokens went to, for a caller that asks a backend to write it down."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification

NO_EXPERTS = -1


class PairCounts(NamedTuple):
    """How many experts a device has asked for in all tokens so far, and how many of them were its host's."""

    seen: int
    here: int


@dataclass(frozen=True)
class Routing:
    """What the blocks of a backend write when they are given this at load time, free of charge.

    `ids` (layers, tokens, experts used) int64: the experts of the last step's tokens, the best liked first;
    NO_EXPERTS in layers without any. Rows beyond the step's tokens are of older steps.
    """

    ids: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, specification: DecoderSpecification, batch: int) -> "Routing":
        """Room for steps of at most `batch` tokens."""
        facts = [layer.feed_forward for layer in specification.layers]
        used = max((fact.used for fact in facts if isinstance(fact, ExpertsSpecification)), default=0)
        return cls(np.full((len(facts), batch, used), NO_EXPERTS, np.int64))
