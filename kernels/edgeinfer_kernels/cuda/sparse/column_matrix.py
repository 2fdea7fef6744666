"""A down projection that a GPU stores by neuron, and the buffers of steps that read its active columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.layout.neuron_layout import ColumnLayout, lay_out_columns
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.neuron_unpacking import ColumnOffsets
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.gathered_neurons import GATHERED_SEGMENT


@dataclass(frozen=True)
class ColumnMatrix(DeviceMatrix):
    """A matrix in the layout of `cpu/layout/neuron_layout.py`; its planes have no memory.

    It takes at most as many bytes as planes do.
    """

    layout: ColumnLayout
    memory: Tensor

    @classmethod
    def take(cls, arena: Arena, source: Matrix) -> "ColumnMatrix":
        """Allocate it. Raises `UnsupportedOnDeviceError`."""
        shapes, layout = (
            PlaneShapes.of(source.name, source.format, source.rows, source.columns),
            ColumnLayout.of(source),
        )
        nothing = torch.empty(0, dtype=torch.int32)
        memory = arena.take((layout.nbytes,), torch.uint8)
        return cls(shapes, source.format, nothing, nothing, nothing, layout, memory)

    def upload(self, source: Matrix) -> None:
        """Copy the weights of the file to the device."""
        self.memory.copy_(torch.from_numpy(lay_out_columns(source)[: self.layout.nbytes]))

    @property
    def offsets(self) -> ColumnOffsets:
        return ColumnOffsets.of(self.layout)


class GatheredSpace:
    """The buffers of steps: lists of active neurons by segment, their activations, and partial sums."""

    def __init__(self, arena: Arena, neurons: int, width: int) -> None:
        segments = -(-neurons // GATHERED_SEGMENT)
        self.neurons = arena.take((segments * GATHERED_SEGMENT,), torch.int32)
        self.counts = arena.take((segments,), torch.int32)
        self.listed = arena.take((MAX_TOKENS, segments * GATHERED_SEGMENT), torch.float32)
        self.parts = arena.take((segments, MAX_TOKENS, width), torch.float32)
