"""Experts of which a token reads only the active neurons: supported blocks, structures and memory."""

from collections.abc import Callable
from ctypes import POINTER, c_int64, cast

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.feed_forward import RELU_ACTIVATIONS
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cpu.block_builder import BuiltBlock
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    NEURON_FORMATS,
    ColumnLayout,
    MemoryOrder,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
    row_groups,
)
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, float_rows
from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK, OUTPUTS_PER_TILE
from edgeinfer_kernels.cpu.runtime.block_args import NeuronColumnsArgs, NeuronRowsArgs
from edgeinfer_kernels.cpu.runtime.experts_args import ExpertsArgs, SparseExpertsArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import InputArgs
from edgeinfer_kernels.cpu.runtime.structure import field_types
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes, allocate
from edgeinfer_kernels.sizes.cuda_buffers import STREAMED_PIECE_BYTES

MAX_EXPERT_BYTES = STREAMED_PIECE_BYTES
"""Prompts stream down of an expert as a whole."""


def why_experts_are_dense(spec: MoeSpec, weights: MoeWeights) -> str | None:
    """The reason why an MoE block cannot read only the active neurons of its experts; None: it can."""
    if spec.activation not in RELU_ACTIVATIONS:
        return f"its activation is {spec.activation}, which is never exactly zero"
    if spec.weighted_input:
        return "the weights of its experts multiply their inputs"
    for matrix in weights.stacks():
        if matrix.format not in NEURON_FORMATS:
            return f"{matrix.name} is {matrix.format}; sparse are {', '.join(NEURON_FORMATS)}"
    up = weights.ffn_up_exps
    if up.rows % NEURONS_PER_BLOCK or up.columns % OUTPUTS_PER_TILE:
        return (
            f"{up.name} is {up.rows} x {up.columns}, wanted a multiple of {NEURONS_PER_BLOCK} x "
            f"{OUTPUTS_PER_TILE}"
        )
    nbytes = ColumnLayout.of(weights.ffn_down_exps).nbytes
    if nbytes > MAX_EXPERT_BYTES:
        return f"down of one expert has {nbytes} bytes by neuron, wanted {MAX_EXPERT_BYTES} at most"
    return None


def expert_stacks_by_neuron(weights: MoeWeights) -> list[Matrix]:
    """The matrices of sparse experts that steps with many tokens read from the file: those by neuron."""
    gated = weights.ffn_gate_exps is not None
    return [*([weights.ffn_up_exps] if gated else []), weights.ffn_down_exps]


def lay_out_experts(stack: Matrix, nbytes: int, lay_out: Callable[[Matrix], Bytes]) -> Bytes:
    """The matrices of all experts by neuron, `nbytes` each, one after the other; newly allocated."""
    memory = allocate(stack.experts * nbytes)
    for index in range(stack.experts):
        memory[index * nbytes : (index + 1) * nbytes] = lay_out(stack.expert(index))[:nbytes]
    return memory


def columns_args(
    name: str, layout: ColumnLayout, kernels: Kernels, address: int, **window: int
) -> NeuronColumnsArgs:
    """The structure of a down projection by neuron at an address; `window`: the fields of a window of it."""
    known = field_types(NeuronColumnsArgs)
    fields = {field: getattr(layout, field) for field in known if hasattr(layout, field)}
    kernel = kernels.address(f"neuron_sums_{name}")
    return NeuronColumnsArgs(kernel=kernel, weights=address, **(fields | window))


def build_sparse_experts(
    arena: Arena, kernels: Kernels, weights: MoeWeights, scratch: tuple[int, int, int]
) -> tuple[int, dict[int, tuple[Bytes, MemoryOrder]]]:
    """The address of a block's SparseExpertsArgs, and the memory of its matrices by neuron, by id.

    `scratch`: the address of the first thread's scratch, bytes per thread, bytes per token by lanes.
    """
    up, down, memories = weights.ffn_up_exps, weights.ffn_down_exps, dict[int, tuple[Bytes, MemoryOrder]]()
    up_rows, up_stride = 0, up.rows * neuron_row_bytes(up)
    if weights.ffn_gate_exps is not None:
        memory = lay_out_experts(up, up_stride, lambda matrix: lay_out_rows(matrix, kernels))
        memories[id(up)] = memory, "rows"
        up_rows = arena.fill(
            NeuronRowsArgs,
            kernel=kernels.address(f"neuron_rows_{up.format}"),
            weights=arena.keep(memory),
            groups=row_groups(up.columns),
            nbytes=neuron_row_bytes(up),
            row_bytes=neuron_row_bytes(up),
        )
    layout = ColumnLayout.of(down)
    memory = lay_out_experts(down, layout.nbytes, lay_out_columns)
    memories[id(down)] = memory, "columns"
    first = arena.keep(memory)
    addresses = (first + index * layout.nbytes for index in range(down.experts))
    columns = [columns_args(down.format, layout, kernels, each) for each in addresses]
    made = arena.fill(
        SparseExpertsArgs,
        up_rows=up_rows,
        up_stride=up_stride,
        down=arena.fill_all(NeuronColumnsArgs, columns),
        scratch=scratch[0],
        scratch_stride=scratch[1],
        lanes_stride=scratch[2],
    )
    return made, memories


def expert_rows(block: int, tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The experts of the tokens of the last step, (tokens, experts per token), and the inputs of their down
    projections, (tokens, experts per token, neurons) float32; `block`: its ExpertsArgs, with all experts.
    """
    args = ExpertsArgs.from_address(block)
    hidden, count = InputArgs.from_address(args.hidden), args.experts_per_token
    ids = np.stack([int_row(args.ids + token * args.ids_stride, count) for token in range(tokens)])
    where = int_row(args.assignment_rows, tokens * count)
    stride = hidden.float_stride // 4
    rows = float_rows(hidden.floats, int(where.max()) + 1, stride)[where, : hidden.columns]
    return ids, rows.reshape(tokens, count, -1)


def int_row(at: int, count: int) -> npt.NDArray[np.int64]:
    """The int64 numbers at an address; the owner of the memory must outlive them."""
    return np.ctypeslib.as_array(cast(at, POINTER(c_int64)), (count,))


def with_sparse_experts(built: BuiltBlock, sparse: int) -> BuiltBlock:
    """An MoE block whose short steps read the SparseExpertsArgs at `sparse`."""
    ExpertsArgs.from_address(built.calls[0].block).sparse = sparse
    call = built.calls[0]
    return built._replace(calls=(call._replace(kernel=f"sparse_{call.kernel}"),))
