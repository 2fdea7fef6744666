"""Output buffers of several rows, reused while no caller refers to them."""

from sys import getrefcount

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS

MAX_KEPT = 3
"""Maximum number of retained arrays: the current one, and earlier ones whose last row may still be in use."""
OWN_REFERENCES = 3
"""References in the list, in the loop, and in the call that counts them."""


class UnpackedRows:
    """Returns arrays (rows, columns) float32 like `np.empty`.

    The operating system maps memory of this size for every allocation, page by page on first write. That
    takes about 30 us for the logits of five tokens with a small vocabulary, a thirtieth of a small model's
    forward.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._kept: list[npt.NDArray[np.float32]] = []

    def rows(self, count: int) -> npt.NDArray[np.float32]:
        """An array without other references to it or to any part of it."""
        if not 1 < count <= STEP_TOKENS:
            return np.empty((count, self._columns), np.float32)
        for kept in self._kept:
            if getrefcount(kept) == OWN_REFERENCES and len(kept) >= count:
                return kept[:count]
        made = np.empty((STEP_TOKENS, self._columns), np.float32)
        self._kept = [made, *self._kept][:MAX_KEPT]
        return made[:count]
