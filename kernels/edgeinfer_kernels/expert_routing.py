"""Records the experts of a step's tokens, for callers that request it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.decoder import DecoderSpec

NO_EXPERTS = -1


@dataclass(frozen=True)
class Routing:
    """Buffer that a backend fills with routing results if it is passed at load time; this has no extra cost.

    `ids` (layers, tokens, experts_per_token) int64: the experts of the last step's tokens, highest score
    first; NO_EXPERTS in layers without experts. Rows beyond the step's tokens hold data of older steps.
    """

    ids: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, spec: DecoderSpec, batch: int) -> "Routing":
        """A buffer for steps of at most `batch` tokens."""
        used = max((block.experts_per_token for block in spec.specs(MoeSpec)), default=0)
        return cls(np.full((len(spec.layers), batch, used), NO_EXPERTS, np.int64))
