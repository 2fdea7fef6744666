"""The sampled token."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class SampledToken(NamedTuple):
    """A sampled token, and the logits from which it was sampled if they were copied to the host."""

    id: int
    logits: npt.NDArray[np.float32] | None
    drafted: bool = False
