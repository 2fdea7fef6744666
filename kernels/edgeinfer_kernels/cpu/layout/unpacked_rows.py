"""Memory for rows that are given away, taken back when nobody holds them any more."""

from sys import getrefcount

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS

MAX_KEPT = 3
"""Arrays that are remembered: of a pass, and of those before whose last row somebody still looks at."""
OWN_REFERENCES = 3
"""In the list, in the loop, and in the call that counts them."""


class UnpackedRows:
    """Gives out arrays (rows, columns) float32 as `np.empty` does.

    A system maps memory of this size anew whenever it is asked for, page by page as it is written: some 30 us
    for the logits of five tokens of a small vocabulary, a thirtieth of a small model's pass.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._kept: list[npt.NDArray[np.float32]] = []

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """An array that nobody else holds, nor any part of it."""
        if not 1 < count <= STEP_TOKENS:
            return np.empty((count, self._columns), np.float32)
        for kept in self._kept:
            if getrefcount(kept) == OWN_REFERENCES and len(kept) >= count:
                return kept[:count]
        made = np.empty((STEP_TOKENS, self._columns), np.float32)
        self._kept = [made, *self._kept][:MAX_KEPT]
        return made[:count]
