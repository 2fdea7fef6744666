"""The compilation units: one for every row format, and others for format-independent code.

Only the build process imports this module, because it imports numba.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from numba import types

from edgeinfer_kernels.cpu.native.amx.amx_gemm import make_tile_rows
from edgeinfer_kernels.cpu.native.attention import attention, encoder_attention
from edgeinfer_kernels.cpu.native.blocks import feed_forward, thread_pool
from edgeinfer_kernels.cpu.native.disk import disk_reader, file_stream
from edgeinfer_kernels.cpu.native.draft import best_tokens, draft_cycles, draft_loop
from edgeinfer_kernels.cpu.native.gemv import embedding, file_rows, interleave, read_memory
from edgeinfer_kernels.cpu.native.gemv.decode_row import make_decode_row
from edgeinfer_kernels.cpu.native.gemv.row_formats import FLOAT_ROW_KERNELS, ROW_FORMATS
from edgeinfer_kernels.cpu.native.gemv.row_loops import make_rows
from edgeinfer_kernels.cpu.native.gemv.rows import ROW_ARGUMENTS
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.structures import numba_type
from edgeinfer_kernels.cpu.native.sparse import sparse_experts, sparse_feed_forward
from edgeinfer_kernels.cpu.native.sparse.neuron_columns import (
    COLUMN_FORMATS,
    NEURON_SUMS_ARGUMENTS,
    make_neuron_sums,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import (
    NEURON_ROWS_ARGUMENTS,
    SPLIT_FORMATS,
    make_neuron_rows,
)
from edgeinfer_kernels.cpu.runtime.block_args import NeuronColumnsArgs

PARTS = {
    "blocks": (
        thread_pool,
        interleave,
        read_memory,
        attention,
        feed_forward,
        file_rows,
        embedding,
        draft_loop,
        draft_cycles,
        best_tokens,
        disk_reader,
        file_stream,
    ),
    "encoder_attention": (encoder_attention,),
    "sparse": (sparse_feed_forward,),
    "sparse_experts": (sparse_experts,),
}
DECODE_ARGUMENTS = 6


@dataclass(frozen=True)
class Target:
    """The target of a build: an LLVM CPU name, its features (`+avx2,+fma`), and whether the unit includes the
    AMX GEMM kernels.
    """

    processor: str
    features: str
    tiles: bool = False

    @property
    def wide(self) -> bool:
        """Whether it has 32 registers of 64 bytes."""
        return "+avx512f" in self.features

    @property
    def matrices(self) -> bool:
        """Whether one instruction multiplies several rows by several tokens."""
        return "+i8mm" in self.features


def unit_exports(unit: str, target: Target) -> dict[str, Any]:
    """Symbol -> (numba function, signature) of a unit: one of PARTS, `rows_<format>`, `neurons_<format>` or a
    module of `native/blocks`.

    Targets share functions where possible, because numba compiles each function once.
    """
    if unit in PARTS:
        return {name: export for part in PARTS[unit] for name, export in part.exports.items()}
    if unit.startswith("neurons_"):
        return neuron_exports(unit.removeprefix("neurons_"))
    if not unit.startswith("rows_"):
        return dict(import_module(f"edgeinfer_kernels.cpu.native.blocks.{unit}").exports.items())
    name = unit.removeprefix("rows_")
    if name in FLOAT_ROW_KERNELS:
        return {unit: float_rows(name)}
    rows_of_target = rows(name, wide=target.wide, matrices=target.matrices)
    exports = {unit: rows_of_target, f"decode_{name}": decode_row(name)}
    return {**exports, f"tile_{unit}": tile_rows(name)} if target.tiles else exports


def compiled_for(function: Any, arguments: int, first: type = int) -> tuple[Any, Any]:
    """An export: the function and its signature, with this many int64 arguments and no result; the `first`
    may be a structure.
    """
    return device_function(function), types.void(numba_type(first), *(types.int64,) * (arguments - 1))


@cache
def float_rows(name: str) -> tuple[Any, Any]:
    return compiled_for(FLOAT_ROW_KERNELS[name](), ROW_ARGUMENTS)


@cache
def rows(name: str, *, wide: bool, matrices: bool) -> tuple[Any, Any]:
    return compiled_for(make_rows(ROW_FORMATS[name], wide=wide, matrices=matrices), ROW_ARGUMENTS)


@cache
def decode_row(name: str) -> tuple[Any, Any]:
    return compiled_for(make_decode_row(ROW_FORMATS[name]), DECODE_ARGUMENTS)


@cache
def tile_rows(name: str) -> tuple[Any, Any]:
    return compiled_for(make_tile_rows(ROW_FORMATS[name]), ROW_ARGUMENTS)


@cache
def neuron_exports(name: str) -> dict[str, Any]:
    """The exports of a sparse feed-forward for one format."""
    rows, sums = make_neuron_rows(SPLIT_FORMATS[name]), make_neuron_sums(COLUMN_FORMATS[name])
    return {
        f"neuron_rows_{name}": compiled_for(rows, NEURON_ROWS_ARGUMENTS),
        f"neuron_sums_{name}": compiled_for(sums, NEURON_SUMS_ARGUMENTS, NeuronColumnsArgs),
    }
