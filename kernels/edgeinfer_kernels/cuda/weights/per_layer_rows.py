"""Rows of the per-layer embeddings: the table stays in the file, the host sends the rows of tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.matrix import Matrix


class PerLayerSpace:
    """Base of the buffers of a block kind that reads rows of the per-layer embeddings."""

    rows: Tensor
    """(tokens, columns) float32: those of the tokens."""


class PerLayerRows:
    """Sends rows of `table` to the buffer of the block kind that reads them; without a table, nothing.

    Before the next rows are sent, the step of the previous ones must be complete.
    """

    def __init__(self, table: Matrix | None, spaces: Iterable[Any]) -> None:
        """`spaces`: the buffers of all block kinds."""
        rows = next((space.rows for space in spaces if isinstance(space, PerLayerSpace)), None)
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
