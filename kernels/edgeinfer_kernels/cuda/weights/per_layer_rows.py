"""Rows of the per-layer embeddings: the table stays in the file, the host sends the rows of tokens."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.matrix import Matrix

ROWS_PER_TASK = 16
"""Rows that a thread decodes at once."""
MAX_THREADS = 8


class PerLayerSpace:
    """Base of the buffers of a block kind that reads rows of the per-layer embeddings."""

    rows: Tensor
    """(tokens, columns) float32: those of the tokens."""
    numbers: Tensor | None = None
    """int64: the numbers of the rows sent and of those that a step waits for, and whether a wait was given
    up. None: a step never waits.
    """


class PerLayerRows:
    """Sends rows of `table` to the buffer of the block kind that reads them; without a table, nothing.

    Before the next rows are sent, the step of the previous ones must be complete.
    """

    def __init__(self, table: Matrix | None, spaces: Iterable[Any]) -> None:
        """`spaces`: the buffers of all block kinds."""
        space = next((space for space in spaces if isinstance(space, PerLayerSpace)), None)
        self._table = None if space is None else table
        self._rows = torch.zeros(0) if space is None else space.rows
        self._numbers = None if space is None else space.numbers
        cuda = self._rows.is_cuda
        self._held = torch.zeros(self._rows.shape, dtype=torch.float32, pin_memory=cuda)
        self._number, self._late = (torch.zeros(1, dtype=torch.int64, pin_memory=cuda) for _ in range(2))
        self._stream: torch.cuda.Stream | None = None

    @property
    def may_follow(self) -> bool:
        """Whether a step may be started before its tokens are known."""
        return self._table is None or (self._rows.is_cuda and self._numbers is not None)

    def send(self, ids: Sequence[int]) -> None:
        """Send the rows of these tokens, in the order of the current stream."""
        if self._table is None:
            return
        if self._stream is not None:
            self._stream.synchronize()
        self._decode(self._table, np.asarray(ids))
        self._rows[: len(ids)].copy_(self._held[: len(ids)], non_blocking=True)

    def expect(self) -> None:
        """The next step, which is about to be launched, waits until `give` has sent its rows."""
        if self._table is not None and self._numbers is not None:
            self._numbers[1:2].add_(1)

    def give(self, ids: Sequence[int]) -> None:
        """Send the rows of the tokens of a step that was launched after `expect`. The steps before it must be
        complete.
        """
        if self._table is None or self._numbers is None:
            return
        self._decode(self._table, np.asarray(ids))
        self._stream = self._stream or torch.cuda.Stream(self._rows.device)
        with torch.cuda.stream(self._stream):
            self._rows[: len(ids)].copy_(self._held[: len(ids)], non_blocking=True)
            self._number += 1
            self._numbers[:1].copy_(self._number, non_blocking=True)
        self._stream.query()  # Some drivers start work only when its state is read.

    def report(self) -> None:
        """After the launch of a step: tell the host, in the order of the stream, whether rows were late."""
        if self._table is not None and self._numbers is not None:
            self._late.copy_(self._numbers[2:], non_blocking=True)

    def were_late(self) -> bool:
        """Whether a reported step has given up waiting, as when the process was stopped for minutes; it has
        to run again.
        """
        late = bool(self._late[0])
        if late and self._numbers is not None:
            self._numbers[2:].zero_()
            self._late.zero_()
        return late

    def _decode(self, table: Matrix, ids: npt.NDArray[np.int64]) -> None:
        """Decode rows to the host's buffer; many of them with several threads."""
        held = self._held.numpy()

        def decode(first: int) -> None:
            some = ids[first : first + ROWS_PER_TASK]
            held[first : first + len(some)] = table.decoded_rows(some)

        if len(ids) <= ROWS_PER_TASK:
            decode(0)
            return
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(decode, range(0, len(ids), ROWS_PER_TASK)))
