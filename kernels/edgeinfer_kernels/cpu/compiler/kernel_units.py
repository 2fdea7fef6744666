"""The units of compiled kernels that a model needs in addition to the common one."""

from collections.abc import Iterable

from edgeinfer_kernels.blocks import BLOCK_KINDS
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.cpu.blocks import units_of
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.cpu.layout.neuron_layout import NEURON_FORMATS
from edgeinfer_kernels.cpu.layout.packed_matrix import kernel_format
from edgeinfer_kernels.cpu.sparse import (
    SparseLayers,
    matrices_by_neuron,
    predictor_matrices,
    predictor_rows,
    sparse_block,
)
from edgeinfer_kernels.decoder import DecoderWeights

SERVICE = "service"
"""Kernels for serving a device, needed by split models."""
SPARSE, SPARSE_EXPERTS = "sparse", "sparse_experts"
"""Kernels of feed-forwards and of experts that read active neurons only."""


def kernel_formats(weights: DecoderWeights, *, head: bool = True) -> set[str]:
    """The formats whose GEMV kernels a model needs. Raises `UnsupportedFormatError`."""
    return {kernel_format(matrix) for matrix in weights.matrices(head=head)}


def row_units(formats: Iterable[str]) -> list[str]:
    """The units of the GEMV kernels for these formats."""
    return [f"rows_{name}" for name in sorted(set(formats))]


def kernel_units(
    weights: DecoderWeights, *, head: bool = True, sparse: SparseLayers | None = None
) -> list[str]:
    """The units that a model needs in addition to the common one. Raises `UnsupportedFormatError`."""
    sparse = sparse or {}
    formats = kernel_formats(weights, head=head) | {kernel_format(m) for m in predictor_matrices(sparse)}
    kinds = {residual.block.kind for layer in weights.layers for residual in layer.blocks}
    blocks = {layer: sparse_block(weights, layer) for layer in sparse}
    stored = [*matrices_by_neuron(blocks, sparse), *predictor_rows(sparse)]
    of_blocks = {SPARSE_EXPERTS if isinstance(block, MoeWeights) else SPARSE for block in blocks.values()}
    by_neuron = sparse_units((matrix.format for matrix in stored), sorted(of_blocks))
    return [*units_of(kinds), *row_units(formats), *by_neuron]


def sparse_units(formats: Iterable[str], blocks: Iterable[str] = (SPARSE,)) -> list[str]:
    """The units of sparse `blocks` (SPARSE, SPARSE_EXPERTS) in these formats; empty without formats."""
    names = [f"neurons_{name}" for name in sorted(set(formats))]
    return [*blocks, *names] if names else []


def every_unit() -> list[str]:
    """All units that any model may need in addition to the common one."""
    return [
        *units_of(BLOCK_KINDS),
        SERVICE,
        *row_units(FIELDS),
        *sparse_units(NEURON_FORMATS, (SPARSE, SPARSE_EXPERTS)),
    ]
