"""A matrix in host memory, in the layout of the CPU kernels, that is streamed to the GPU for use."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.neuron_layout import ColumnLayout, MemoryOrder, neuron_row_bytes
from edgeinfer_kernels.cpu.layout.packed_matrix import expert_bytes, group_bytes, kernel_format
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes


class StoredBytes(NamedTuple):
    """The bytes of a matrix in host memory, uint8, and how they are stored."""

    memory: Tensor
    order: MemoryOrder


@dataclass(frozen=True)
class StreamedMatrix(DeviceMatrix):
    """A matrix of the host, or one per expert; its planes have no memory.

    `format` is that in memory, which may differ from the file's. `order` (head_dim,): order of its rows
    within each head on the device; None: unchanged.
    """

    source: Matrix
    order: Tensor | None
    stored: list[StoredBytes]
    """Its bytes, once the host is known."""

    @classmethod
    def of(cls, source: Matrix, order: Tensor | None = None) -> "StreamedMatrix":
        """Raises `UnsupportedOnDeviceError`: the device has no kernel for the format."""
        shapes = PlaneShapes.of(source.name, source.format, source.rows, source.columns)
        nothing = torch.empty(0, dtype=torch.int32)
        return cls(shapes, kernel_format(source), nothing, nothing, nothing, source, order, [])

    def connect(self, memory: Bytes, order: MemoryOrder) -> Tensor:
        """Set its bytes; return them as a tensor."""
        self.stored[:] = [StoredBytes(torch.from_numpy(memory), order)]
        return self.memory

    @property
    def memory(self) -> Tensor:
        """(bytes,) uint8."""
        return self.stored[0].memory

    @property
    def order_in_memory(self) -> MemoryOrder:
        """How its bytes are stored."""
        return self.stored[0].order

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of sixteen rows that are interleaved, or stored by neuron."""
        if self.order_in_memory == "rows":
            return ROWS_PER_GROUP * neuron_row_bytes(self.source)
        return group_bytes(self.source)

    @cached_property
    def expert_bytes(self) -> int:
        if self.order_in_memory == "rows":
            return self.shapes.rows * neuron_row_bytes(self.source)
        if self.order_in_memory == "columns":
            return ColumnLayout.of(self.source).nbytes
        return expert_bytes(self.source)
