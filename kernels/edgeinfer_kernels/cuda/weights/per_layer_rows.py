"""Rows of the per-layer embeddings: the table stays in the file, the host sends the rows of tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.matrix import Matrix


class PerLayerRows:
    """Sends rows of `table` to `rows` (tokens, columns) float32 on the device; without a table, nothing.

    Before the next rows are sent, the step of the previous ones must be complete.
    """

    def __init__(self, table: Matrix | None, rows: Tensor | None) -> None:
        self._table, self._rows = table, rows
        pinned = rows is not None and rows.is_cuda
        shape = (0,) if rows is None else rows.shape
        self._held = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned)

    def send(self, ids: Sequence[int]) -> None:
        """Send the rows of these tokens."""
        if self._table is not None and self._rows is not None:
            count = len(ids)
            rows = self._table.decoded_rows(np.asarray(ids)).astype(np.float32)
            self._held[:count].copy_(torch.from_numpy(rows))
            self._rows[:count].copy_(self._held[:count], non_blocking=True)
