"""A decoder's weights, caches and buffers as they lie on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.cuda.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.specification import AttentionSpecification, DecoderSpecification, RopeSpecification
from edgeinfer_kernels.weights import (
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    LayerWeights,
    Matrix,
    Vector,
)

OnPlaced = Callable[[Matrix], None]
SPARE_POSITIONS = 16
"""Positions of a cache beyond the context: a step writes whole tiles."""


def padded_rows(rows: int) -> int:
    """Rows that a matrix of so many takes."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def head_order(rope: RopeSpecification | None, head_dim: int) -> npt.NDArray[np.int64]:
    """The order of a head's dimensions in which RoPE turns (i, i + head_dim/2), whatever the file's pairs.

    Dimensions that RoPE leaves alone are spread over both halves.
    """
    dimensions = np.arange(head_dim)
    if rope is None:
        return dimensions
    turned = rope.dimensions
    if rope.halves:
        first, second = dimensions[: turned // 2], dimensions[turned // 2 : turned]
    else:
        first, second = dimensions[0:turned:2], dimensions[1:turned:2]
    rest = dimensions[turned:]
    middle = len(rest) // 2
    return np.concatenate([first, rest[:middle], second, rest[middle:]])


def rope_table(rope: RopeSpecification | None, head_dim: int, positions: int) -> npt.NDArray[np.float32]:
    """(positions, head_dim): cosines of the pairs, then sines; 1 and 0 where nothing turns."""
    half = head_dim // 2
    table = np.zeros((positions, head_dim), np.float32)
    table[:, :half] = 1.0
    if rope is None:
        return table
    turned = rope.dimensions // 2
    both = rope.table(0, positions)
    table[:, :turned], table[:, half : half + turned] = both[:, :turned], both[:, turned:]
    return table


@dataclass(frozen=True)
class Stack:
    """Matrices on top of each other, those of one format as one; at most two launches' worth of formats."""

    parts: tuple[DeviceMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.shapes.padded_rows for part in self.parts)


@dataclass(frozen=True)
class DeviceAttention:
    """One layer's attention on the device; vectors are None where there is nothing to do."""

    qkv: Stack
    output: DeviceMatrix
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    post_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    table: Tensor


@dataclass(frozen=True)
class DeviceFeedForward:
    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    post_norm: Tensor | None


@dataclass(frozen=True)
class DeviceCache:
    """One layer's keys and values: float16 (kv_heads, positions, head_dim), or int8 with scales for 32."""

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    @classmethod
    def take(
        cls, arena: Arena, facts: AttentionSpecification, positions: int, quantised: bool
    ) -> "DeviceCache":
        shape = (facts.kv_heads, positions, facts.head_dim)
        groups = (facts.kv_heads, positions, -(-facts.head_dim // 32)) if quantised else (0,)
        dtype = torch.int8 if quantised else torch.float16
        keys, key_scales = arena.take(shape, dtype), arena.take(groups, torch.float16)
        values, value_scales = arena.take(shape, dtype), arena.take(groups, torch.float16)
        return cls(keys, key_scales, values, value_scales)


@dataclass(frozen=True)
class DeviceLayer:
    attention: DeviceAttention
    feed_forward: DeviceFeedForward
    cache: DeviceCache


LAYER_PARTS = ("attention", "feed-forward", "keys and values")


@dataclass(frozen=True)
class Part:
    """Some of the device's bytes; `read`: every token reads them."""

    name: str
    nbytes: int
    read: bool


@dataclass(frozen=True)
class _Fill:
    """A matrix of the file and where its rows go; `order`: its rows within each group of that many."""

    source: Matrix
    target: DeviceMatrix
    first_row: int
    order: npt.NDArray[np.int64] | None


class DeviceModel:
    """Everything of a decoder that lies on the device; built in a counting arena it only tells its size.

    `embeds` False: rows of the residual stream come from another backend, and there is no embedding.

    Raises:
        UnsupportedOnDeviceError: a matrix or a layer without a kernel.
    """

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        arena: Arena,
        context: int,
        *,
        quantised_cache: bool = False,
        embeds: bool = True,
    ) -> None:
        self.specification = specification
        self.embeds = embeds
        self.context = context
        self.quantised_cache = quantised_cache
        self.positions = context + SPARE_POSITIONS
        self._arena = arena
        self._fills: list[_Fill] = []
        self._vectors: list[tuple[Tensor, npt.NDArray[np.float32]]] = []
        self._tables: dict[tuple[RopeSpecification | None, int], Tensor] = {}
        self.parts: list[Part] = []
        self.layers = [self._layer(index, w) for index, w in enumerate(weights.layers)]
        before = arena.used
        self.norm = self._vector(weights.output_norm)
        self.norm_bias = self._vector(weights.output_norm_bias)
        self.head = self._matrix(weights.output)
        self.parts.append(Part("head", arena.used - before, read=True))
        self.embedding = self.head
        if embeds and weights.token_embd is not weights.output:
            before = arena.used
            self.embedding = self._matrix(weights.token_embd)
            self.parts.append(Part("embedding", arena.used - before, read=False))

    def _layer(self, index: int, weights: LayerWeights) -> DeviceLayer:
        facts, arena = self.specification.layers[index], self._arena
        if isinstance(weights.feed_forward, ExpertWeights) or facts.attention.sinks:
            what = "attention sinks" if facts.attention.sinks else "a mixture of experts"
            raise UnsupportedOnDeviceError(f"layer {index} has {what}, which run on the CPU only so far")
        marks = [arena.used]
        attention = self._attention(weights, facts.attention)
        marks.append(arena.used)
        feed_forward = self._feed_forward(weights.feed_forward)
        marks.append(arena.used)
        cache = DeviceCache.take(arena, facts.attention, self.positions, self.quantised_cache)
        marks.append(arena.used)
        for what, begin, end in zip(LAYER_PARTS, marks, marks[1:], strict=False):
            self.parts.append(Part(f"layer {index} {what}", end - begin, read=True))
        return DeviceLayer(attention, feed_forward, cache)

    def _matrix(self, source: Matrix) -> DeviceMatrix:
        target = self._arena.matrix(source.name, source.format, source.rows, source.columns)
        self._fills.append(_Fill(source, target, 0, None))
        return target

    def _vector(self, values: Vector | None, size: int = 0) -> Tensor | None:
        """The values in float32, padded with zeros to `size`."""
        if values is None:
            return None
        padded = np.zeros(max(size, len(values)), np.float32)
        padded[: len(values)] = values
        tensor = self._arena.take(padded.shape, torch.float32)
        self._vectors.append((tensor, padded))
        return tensor

    def _attention(self, layer: LayerWeights, facts: AttentionSpecification) -> DeviceAttention:
        w = layer.attention
        if w.attn_q.rows % ROW_MULTIPLE or w.attn_k.rows % ROW_MULTIPLE:
            raise UnsupportedOnDeviceError(
                f"{w.attn_k.name}: {w.attn_k.rows} rows (q: {w.attn_q.rows}), the GPU's kernels want a "
                f"multiple of {ROW_MULTIPLE}"
            )
        order = head_order(facts.rope, facts.head_dim)
        biases = (w.attn_q_bias, w.attn_k_bias, w.attn_v_bias)
        return DeviceAttention(
            qkv=self._stack(((w.attn_q, order), (w.attn_k, order), (w.attn_v, None))),
            output=self._matrix(w.attn_output),
            qkv_bias=self._stacked_bias(biases, (w.attn_q, w.attn_k, w.attn_v), (order, order, None)),
            output_bias=self._vector(w.attn_output_bias),
            norm=self._vector(w.attn_norm),
            norm_bias=self._vector(w.attn_norm_bias),
            post_norm=self._vector(w.attn_post_norm),
            q_norm=self._vector(_reordered(w.attn_q_norm, order)),
            k_norm=self._vector(_reordered(w.attn_k_norm, order)),
            table=self._table(facts),
        )

    def _stack(self, matrices: Sequence[tuple[Matrix, npt.NDArray[np.int64] | None]]) -> Stack:
        """Neighbours of one format share planes."""
        runs: list[list[tuple[Matrix, npt.NDArray[np.int64] | None]]] = []
        for entry in matrices:
            if runs and runs[-1][-1][0].format == entry[0].format:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        return Stack(tuple(self._run(run) for run in runs))

    def _run(self, run: Sequence[tuple[Matrix, npt.NDArray[np.int64] | None]]) -> DeviceMatrix:
        top = run[0][0]
        target = self._arena.matrix(top.name, top.format, sum(m.rows for m, _ in run), top.columns)
        row = 0
        for matrix, order in run:
            self._fills.append(_Fill(matrix, target, row, order))
            row += matrix.rows
        return target

    def _stacked_bias(
        self,
        biases: Sequence[Vector | None],
        matrices: Sequence[Matrix],
        orders: Sequence[npt.NDArray[np.int64] | None],
    ) -> Tensor | None:
        if all(bias is None for bias in biases):
            return None
        stacked = []
        for bias, matrix, order in zip(biases, matrices, orders, strict=True):
            values = np.zeros(padded_rows(matrix.rows), np.float32)
            if bias is not None:
                values[: matrix.rows] = bias if order is None else _reordered(bias, order)
            stacked.append(values)
        return self._vector(np.concatenate(stacked))

    def _table(self, facts: AttentionSpecification) -> Tensor:
        key = facts.rope, facts.head_dim
        if key not in self._tables:
            table = rope_table(facts.rope, facts.head_dim, self.positions)
            tensor = self._arena.take(table.shape, torch.float32)
            self._vectors.append((tensor, table))
            self._tables[key] = tensor
        return self._tables[key]

    def _feed_forward(self, w: FeedForwardWeights) -> DeviceFeedForward:
        rows = padded_rows(w.ffn_up.rows)
        has_bias = w.ffn_gate_bias is not None or w.ffn_up_bias is not None
        zeros = np.zeros(rows, np.float32)
        gate_bias = w.ffn_gate_bias if w.ffn_gate_bias is not None else zeros
        up_bias = w.ffn_up_bias if w.ffn_up_bias is not None else zeros
        return DeviceFeedForward(
            gate=None if w.ffn_gate is None else self._matrix(w.ffn_gate),
            up=self._matrix(w.ffn_up),
            down=self._matrix(w.ffn_down),
            gate_bias=self._vector(gate_bias, rows) if has_bias else None,
            up_bias=self._vector(up_bias, rows) if has_bias else None,
            down_bias=self._vector(w.ffn_down_bias),
            norm=self._vector(w.ffn_norm),
            norm_bias=self._vector(w.ffn_norm_bias),
            post_norm=self._vector(w.ffn_post_norm),
        )

    def fill(self, uploader: Uploader, on_placed: OnPlaced | None = None) -> None:
        """Bring all weights from the file into place; `on_placed` hears of every matrix that has come."""
        for tensor, values in self._vectors:
            tensor.copy_(torch.from_numpy(values))
        for entry in self._fills:
            self._fill(entry, uploader)
            if on_placed:
                on_placed(entry.source)
        self._vectors.clear()
        self._fills.clear()

    def _fill(self, entry: _Fill, uploader: Uploader) -> None:
        size = 2 if entry.order is None else len(entry.order)
        if size % 2:  # rows are paired: two heads at a time
            size *= 2
        for first, raw in uploader.chunks(entry.source.raw, size):
            if entry.order is not None:
                heads = raw.view(-1, len(entry.order), raw.shape[1])
                raw = heads[:, torch.from_numpy(entry.order).to(raw.device)].view(raw.shape)
            entry.target.fill(entry.first_row + first, raw)


def _reordered(vector: Vector | None, order: npt.NDArray[np.int64]) -> Vector | None:
    """A vector over heads, each head's dimensions in their new order."""
    if vector is None:
        return None
    return np.ascontiguousarray(vector.reshape(-1, len(order))[:, order].reshape(-1))
