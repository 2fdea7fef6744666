"""Records the experts of a step's tokens, for callers that request it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification

NO_EXPERTS = -1


class PairCounts(NamedTuple):
    """Token-expert assignments so far: all of them, and those that the CPU computed."""

    seen: int
    here: int


@dataclass(frozen=True)
class Routing:
    """Buffer that a backend fills with routing results if it is passed at load time; this has no extra cost.

    `ids` (layers, tokens, experts_per_token) int64: the experts of the last step's tokens, highest score
    first; NO_EXPERTS in layers without experts. Rows beyond the step's tokens hold data of older steps.
    """

    ids: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, specification: DecoderSpecification, batch: int) -> "Routing":
        """A buffer for steps of at most `batch` tokens."""
        facts = [layer.feed_forward for layer in specification.layers]
        used = max((fact.used for fact in facts if isinstance(fact, ExpertsSpecification)), default=0)
        return cls(np.full((len(facts), batch, used), NO_EXPERTS, np.int64))
