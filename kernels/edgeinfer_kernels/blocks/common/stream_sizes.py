"""The sizes of AltUp's blocks, which read and write the streams of a token."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockSizes
from edgeinfer_kernels.blocks.gemma3n import CPU_ONLY
from edgeinfer_kernels.blocks.layer_output import LayerOutputSizes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import MatrixSize


@dataclass(frozen=True)
class StreamSizes(BlockSizes):
    """`projections`: the matrices that expand x to the streams, or merge them. `output`: the sizes of the
    input from the per-layer embeddings, after a layer.
    """

    label: ClassVar[str] = "AltUp"
    cpu_only: ClassVar[str] = CPU_ONLY
    reads_other_layers: ClassVar[bool] = True

    streams: int
    projections: tuple[MatrixSize, ...] = ()
    output: LayerOutputSizes | None = None

    def undivided(self) -> list[MatrixSize]:
        return [*self.projections, *(self.output.undivided() if self.output else [])]

    def undivided_device_bytes(self) -> int:
        raise UnsupportedOnDeviceError(CPU_ONLY)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        nbytes = 4 * self.streams * padded(hidden_size)
        own = self.output.cpu_buffers(hidden_size) if self.output else {}
        return {"streams": nbytes, "predictions": nbytes, **own}

    def inputs(self) -> list[MatrixSize]:
        return [*self.projections, *(self.output.inputs() if self.output else [])]

    def outputs(self) -> list[MatrixSize]:
        return self.output.outputs() if self.output else []
