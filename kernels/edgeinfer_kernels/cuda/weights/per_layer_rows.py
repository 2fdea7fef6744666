"""Rows of the per-layer embeddings: the table is in device memory, or stays in the file, and the host gives
the rows of tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.triton_ops.raw_rows import RawConfig, raw_config
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_matrices import reads_raw_rows


class PerLayerSpace:
    """Base of the buffers of a block kind that reads rows of the per-layer embeddings."""

    rows: Tensor
    """Those of the tokens, in pinned host memory: the file's bytes (tokens, bytes of a row), or float32
    (tokens, columns) where kernels can't decode them. Or the file's bytes of the whole table, on the device.
    """
    has_table: bool = False
    """Whether `rows` are the whole table."""
    raw: RawConfig | None = None
    """The format of the file's bytes; None: `rows` are floats."""
    rows_per_chunk: int
    """Rows in `rows`."""
    numbers: Tensor | None = None
    """int64: the numbers of the rows given and of those that a step waits for, and whether a wait was given
    up. None: a step never waits.
    """


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """The table of a model, and its bytes on the device, if they are there."""

    table: Matrix | None
    rows: Tensor | None = None

    @classmethod
    def take(cls, table: Matrix | None, arena: Arena, on_device: bool) -> "PerLayerEmbeddings":
        """`on_device`: allocate memory for the table."""
        if table is None or not on_device:
            return cls(table)
        assert reads_raw_rows(table.format), f"no kernel for rows in {table.format}"
        return cls(table, arena.take((table.rows, table.nbytes // table.rows), torch.uint8))

    def fill(self, uploader: Uploader) -> None:
        """Upload the table, if it has memory on the device."""
        if self.table is not None and self.rows is not None:
            for first, raw in uploader.chunks(self.table.raw, 1):
                self.rows[first : first + len(raw)] = raw


class PerLayerRows:
    """Gives rows of the table to the block kind that reads them; nothing without a table, or if the device
    has it.

    Before the next rows are given, the step of the previous ones must be complete.
    """

    def __init__(self, embeddings: PerLayerEmbeddings, spaces: Iterable[Any], device: torch.device) -> None:
        """`spaces`: the buffers of all block kinds; those that read rows get them."""
        self._cuda = device.type == "cuda"
        self._device = device
        space = next((space for space in spaces if isinstance(space, PerLayerSpace)), None)
        table, there = embeddings.table, embeddings.rows
        self._table = None if space is None or there is not None else table
        self._numbers = None if space is None else space.numbers
        self._number, self._late = (self._host(1, dtype=torch.int64) for _ in range(2))
        self._stream: torch.cuda.Stream | None = None
        self._rows = self._host(0, dtype=torch.uint8)
        if space is not None and table is not None:
            space.raw = raw_config(table.format, table.columns)
            columns, dtype = table.columns, torch.float32
            if space.raw is not None:
                columns, dtype = space.raw.row_bytes, torch.uint8
            if there is not None:
                space.rows, space.has_table = there, True
            else:
                self._rows = space.rows = self._host(space.rows_per_chunk, columns, dtype=dtype)
        self._is_raw = space is not None and space.raw is not None

    def _host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

    @property
    def is_given(self) -> bool:
        """Whether the host gives the rows of a step's tokens."""
        return self._table is not None

    @property
    def may_follow(self) -> bool:
        """Whether a step may be started before its tokens are known."""
        return self._table is None or (self._cuda and self._numbers is not None)

    def send(self, ids: Sequence[int]) -> None:
        """Give the rows of the tokens of the next step, which is not launched yet."""
        if self._table is not None:
            indices = np.asarray(ids)
            rows = self._table.raw[indices] if self._is_raw else self._table.decoded_rows(indices)
            self._rows.numpy()[: len(ids)] = rows

    def expect(self) -> None:
        """The next step, which is about to be launched, waits until `give` has given its rows."""
        if self._table is not None and self._numbers is not None:
            self._numbers[1:2].add_(1)

    def give(self, ids: Sequence[int]) -> None:
        """Give the rows of the tokens of a step that was launched after `expect`. The steps before it must be
        complete.
        """
        if self._table is None or self._numbers is None:
            return
        self.send(ids)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
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
