"""What a draft head on a GPU uses of its target there: it reads the embedding, the output and the kept
states, and may start the step that verifies a draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows


@dataclass(frozen=True)
class HeadTarget:
    """The target of a draft head on the same device.

    `embedding`, `output`: its matrices; None: the head has its own. `states`: those that the target keeps,
    the rows of a `StateRing`. `verification`: of its drafts; None: it can't start before the host has them.
    `caches`: of the target, for attention blocks of the head that read these.
    """

    embedding: DeviceMatrix | None
    output: DeviceMatrix | None
    states: Tensor
    verification: StartedVerification | None = None
    caches: Mapping[BlockIndex, DeviceCache] = field(default_factory=dict)


def first_rows(matrix: DeviceMatrix, rows: int) -> DeviceMatrix:
    """The first rows of a matrix in the same memory; rows in the middle begin a group of sixteen."""
    shapes = replace(matrix.shapes, rows=rows)
    if rows > matrix.shapes.rows or (rows < matrix.shapes.rows and padded_rows(rows) != rows):
        raise ValueError(f"first rows of a matrix: saw {rows}, wanted a multiple of 16 up to its rows")
    words, scales, super_scales = (
        part[: shape[0]]
        for part, shape in zip(matrix.parts, (shapes.words, shapes.scales, shapes.super_scales), strict=True)
    )
    return DeviceMatrix(shapes, matrix.format, words, scales, super_scales)
