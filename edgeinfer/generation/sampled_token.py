"""The token that follows a text."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class SampledToken(NamedTuple):
    """A token that follows; the logits that it was drawn from, if they came to the host."""

    id: int
    logits: npt.NDArray[np.float32] | None
    drafted: bool = False
