"""Prefill matmul: weights are dequantized to float16 in a scratch buffer, slice by slice, for the library
matmul.

The GPU's weights come from its planes; the CPU's weights are streamed.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.blocks.moe import MoeSizes
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.neuron_layout import ColumnLayout, neuron_row_bytes
from edgeinfer_kernels.cpu.runtime.abi import NEURONS_PER_BLOCK
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.lora import DeviceLora, adapted
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, activation_norm_rows, activation_rows
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import dequantize_kernel
from edgeinfer_kernels.cuda.triton_ops.neuron_unpacking import (
    unpack_neuron_columns,
    unpack_neuron_rows,
)
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.weights.device_builder import Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_buffers import chunk_rows, prompt_scratch
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward

DEQUANTIZED_BLOCKS = 32
"""Blocks of a row that a program dequantizes."""
DEQUANTIZING_WARPS = 8
LARGEST_F16 = 65504.0
KEPT_TOKENS = 16
"""Maximum number of tokens whose hidden rows are kept."""


class Products:
    """Matmul of at most `chunk` rows with any matrix of a decoder of these `sizes`; buffers come from the
    arena.

    `sender` streams the CPU's matrices, if enabled.
    """

    def __init__(self, sizes: ModelSizes, arena: Arena, chunk: int) -> None:
        rooms = chunk_rows(sizes, chunk)
        moe = sizes.of_kind(MoeSizes)
        self.chunk = chunk
        self.expert_rows = max((block.together(chunk, sizes.hidden_size) for block in moe), default=0)
        self.sender: WeightStreamer | None = None
        self.lora: Mapping[int, DeviceLora] = {}
        """The LoRA adapters in use, by the id of the `DeviceMatrix`."""
        self.kept: list[Tensor] | None = None
        """If not None, hidden rows of some tokens are appended to it, in main memory."""
        self._hidden = arena.take((rooms.hidden,), torch.float16)
        self._hidden_scales = arena.take((rooms.scales,), torch.float32)
        self._products = arena.take((rooms.products,), torch.float32)
        self.scratch = arena.take((prompt_scratch(sizes),), torch.float16)

    def floats(self, *shape: int) -> Tensor:
        """A float32 buffer for results; the next result overwrites it."""
        return self._products[: torch.Size(shape).numel()].view(shape)

    def hidden(self, rows: int, columns: int) -> ScaledRows:
        """A buffer for hidden rows."""
        return ScaledRows(self._hidden[: rows * columns].view(rows, columns), self.scales(rows))

    def scales(self, rows: int) -> Tensor:
        """A buffer for the scales of rows; that of `hidden`."""
        return self._hidden_scales[:rows]

    def multiply(self, rows: Tensor, matrix: DeviceMatrix, out: Tensor) -> None:
        """out (tokens, outputs) float32 = rows (tokens, columns) float16 · the matrix transposed."""
        if isinstance(matrix, ColumnMatrix):
            self._multiply_columns(rows, matrix, out)
        elif isinstance(matrix, StreamedMatrix) and matrix.order_in_memory == "columns":
            self._multiply_by_neuron(rows, matrix, out)
        else:
            for _ in self.by_columns(rows, matrix, out, matrix.shapes.rows):
                pass

    def by_columns(
        self, rows: Tensor, matrix: DeviceMatrix, out: Tensor, at_once: int
    ) -> Iterator[tuple[int, int]]:
        """As `multiply`; yields (first column, number of columns) of `out` when they are computed, about
        `at_once` of them, or all if the matrix has an adapter.
        """
        loras = adapted(self.lora, (matrix,))
        for first, weights in self._slices(matrix, ROWS_PER_GROUP, at_once):
            _matrix_product(rows, weights, out[:, first : first + len(weights)])
            if not loras:
                yield first, len(weights)
        for lora in loras:
            lora.add(rows, out)
        if loras:
            yield 0, matrix.shapes.rows

    def _multiply_by_neuron(self, rows: Tensor, matrix: StreamedMatrix, out: Tensor) -> None:
        """The same with down by neuron: each slice of neurons adds its share of all outputs."""
        assert self.sender is not None
        layout = ColumnLayout.of(matrix.source)
        neurons = NEURONS_PER_BLOCK * layout.blocks_per_super
        count, outputs = layout.blocks // layout.blocks_per_super, matrix.shapes.rows
        fitting = len(self.scratch) // (neurons * layout.outputs)
        step = max(min(fitting, self.sender.piece_bytes // layout.super_bytes), 1)
        for first in range(0, count, step):
            last = min(count, first + step)
            raw = self.sender.send(matrix.memory, [(first * layout.super_bytes, last * layout.super_bytes)])
            here = (last - first) * neurons
            weights = self.scratch[: here * layout.outputs].view(here, layout.outputs)
            unpack_neuron_columns(raw, matrix.format, layout, weights)
            self.sender.done()
            part = rows[:, first * neurons : last * neurons]
            _add_product(part, weights[:, :outputs], out, is_first=first == 0)

    def _multiply_columns(self, rows: Tensor, matrix: ColumnMatrix, out: Tensor) -> None:
        """The same with down by neuron on the device."""
        layout = matrix.layout
        neurons = NEURONS_PER_BLOCK * layout.blocks_per_super
        count = layout.blocks // layout.blocks_per_super
        step = max(len(self.scratch) // (neurons * layout.outputs), 1)
        for first in range(0, count, step):
            last = min(count, first + step)
            raw = matrix.memory[first * layout.super_bytes : last * layout.super_bytes]
            here = (last - first) * neurons
            weights = self.scratch[: here * layout.outputs].view(here, layout.outputs)
            unpack_neuron_columns(raw, matrix.format, layout, weights)
            part = rows[:, first * neurons : last * neurons]
            _add_product(part, weights, out, is_first=first == 0)

    def by_head(self, rows: Tensor, matrix: DeviceMatrix, out: Tensor) -> None:
        """out (tokens, heads, outputs) float16 = rows (tokens, heads, columns) float16 · the rows of the
        matrix for this head, transposed; values outside the range of float16 are clamped.
        """
        outputs = out.shape[2]
        for first, weights in self._slices(matrix, outputs):
            heads = slice(first // outputs, (first + len(weights)) // outputs)
            _head_products(rows[:, heads], weights.unflatten(0, (-1, outputs)), out[:, heads])

    def _slices(
        self, matrix: DeviceMatrix, multiple: int, at_once: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows dequantized to float16) of a matrix, slice by slice; whole multiples of rows, on
        the GPU about `at_once`.
        """
        if isinstance(matrix, StreamedMatrix):
            yield from self._streamed_slices(matrix, multiple)
            return
        shapes = matrix.shapes
        columns = shapes.columns
        step = self.rows_at_once(columns, multiple)
        if at_once is not None:
            step = min(step, max(1, at_once // multiple) * multiple)
        for first in range(0, shapes.rows, step):
            count = min(step, shapes.rows - first)
            weights = self.scratch[: count * columns].view(count, columns)
            dequantize_kernel[(-(-shapes.blocks // DEQUANTIZED_BLOCKS), -(-count // 16))](
                matrix.parts,
                first,
                weights,
                count,
                COLUMNS=columns,
                BLOCKS=shapes.blocks,
                STEP=DEQUANTIZED_BLOCKS,
                TILE=shapes.tile,
                num_warps=DEQUANTIZING_WARPS,
            )
            yield first, weights

    def rows_at_once(self, columns: int, multiple: int = ROWS_PER_GROUP) -> int:
        """Rows of a matrix that fit the scratch."""
        return max(len(self.scratch) // columns // multiple, 1) * multiple

    def _streamed_slices(self, matrix: StreamedMatrix, multiple: int) -> Iterator[tuple[int, Tensor]]:
        assert self.sender is not None
        if matrix.order_in_memory == "rows":
            yield from self._slices_by_neuron(matrix)
            return
        columns, matrix_rows, group_bytes = matrix.shapes.columns, matrix.shapes.rows, matrix.group_bytes
        piece_rows = self.sender.piece_bytes // group_bytes * ROWS_PER_GROUP // multiple * multiple
        step = min(self.rows_at_once(columns, multiple), piece_rows)
        for first in range(0, matrix_rows, step):
            count = min(step, matrix_rows - first)
            groups = -(-count // ROWS_PER_GROUP)
            begin = first // ROWS_PER_GROUP * group_bytes
            raw = self.sender.send(matrix.memory, [(begin, begin + groups * group_bytes)])
            weights = self.scratch[: groups * ROWS_PER_GROUP * columns].view(-1, columns)
            unpack(raw, matrix.format, columns, weights)
            if matrix.source.scales is not None:
                weights.mul_(float(matrix.source.scales[0]))
            self.sender.done()
            yield first, weights[:count]

    def _slices_by_neuron(self, matrix: StreamedMatrix) -> Iterator[tuple[int, Tensor]]:
        """As `_streamed_slices`, of gate or up by neuron."""
        assert self.sender is not None
        rows, row_bytes = matrix.shapes.rows, neuron_row_bytes(matrix.source)
        columns = matrix.shapes.columns
        step = max(min(len(self.scratch) // columns, self.sender.piece_bytes // row_bytes), 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = self.sender.send(matrix.memory, [(first * row_bytes, (first + count) * row_bytes)])
            weights = self.scratch[: count * columns].view(count, columns)
            unpack_neuron_rows(raw, matrix.format, weights)
            self.sender.done()
            yield first, weights

    def dense(self, activation: Activation, w: "DeviceFeedForward", h: ScaledRows) -> tuple[Tensor, Tensor]:
        """down · hidden without its bias, (tokens, hidden_size) float32, and the row scales that remain to be
        multiplied. Both are overwritten by the next matmul.
        """
        inner = self.hidden_of(activation, w, h)
        return self.product(inner.rows, w.down), inner.scales

    def hidden_of(self, activation: Activation, w: "DeviceFeedForward", h: ScaledRows) -> ScaledRows:
        """The hidden rows of a feed-forward, which the next one overwrites."""
        tokens, hidden = len(h.rows), w.neurons
        both = self.floats(2, tokens, hidden)
        up, gate = both[0], None
        self.multiply(h.rows, w.up, up)
        if w.gate is not None:
            gate = both[1]
            self.multiply(h.rows, w.gate, gate)
        inner = self.hidden(tokens, hidden)
        if w.sub_norm is None:
            activation_rows(gate, up, w.gate_bias, w.up_bias, h.scales, activation, inner.rows, inner.scales)
        else:
            for product, scale in ((up, w.up_scale), (gate, w.gate_scale)):
                if product is not None and scale != 1:
                    product.mul_(scale)
            activation_norm_rows(gate, up, w.gate_bias, w.up_bias, h.scales, activation, w.sub_norm, inner)
        if self.kept is not None:
            self.kept.append(inner.rows[:: -(-tokens // KEPT_TOKENS)].to("cpu", copy=True))
        return inner

    def stacked(self, rows: Tensor, stack: Stack) -> Tensor:
        """rows (tokens, columns) float16 · each matrix of the stack, side by side, float32.

        The next matmul overwrites it.
        """
        out = self.floats(len(rows), sum(part.shapes.rows for part in stack.parts))
        first = 0
        for part in stack.parts:
            product = out[:, first : first + part.shapes.rows]
            self.multiply(rows, part, product)
            if isinstance(part, StreamedMatrix) and part.order is not None:
                heads = product.unflatten(1, (-1, len(part.order)))
                heads.copy_(heads.index_select(2, part.order))
            first += part.shapes.rows
        return out

    def product(self, rows: Tensor, matrix: DeviceMatrix) -> Tensor:
        """rows (tokens, columns) float16 · the matrix, float32; overwritten by the next matmul."""
        out = self.floats(len(rows), matrix.shapes.rows)
        self.multiply(rows, matrix, out)
        return out


def _head_products(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """out (tokens, heads, outputs) = rows (tokens, heads, columns) · weights (heads, outputs, columns)."""
    if rows.is_cuda:
        torch.bmm(rows.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))
        out.clamp_(-LARGEST_F16, LARGEST_F16)
    else:
        product = torch.einsum("thc,hoc->tho", rows.float(), weights.float())
        out.copy_(product.clamp_(-LARGEST_F16, LARGEST_F16))


def _matrix_product(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    if rows.is_cuda:
        torch.mm(rows, weights.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(rows.float(), weights.t().float(), out=out)


def _add_product(rows: Tensor, weights: Tensor, out: Tensor, *, is_first: bool) -> None:
    """out = rows · weights, or out += it unless it is the first."""
    beta = 0 if is_first else 1
    if rows.is_cuda:
        torch.addmm(out, rows, weights, out_dtype=torch.float32, beta=beta, out=out)
    else:
        torch.addmm(out, rows.float(), weights.float(), beta=beta, out=out)
