"""One layer's weights in the form that a device computes with, built from the file's weights.

A subclass of `LayerBuilder` defines where the matrices are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.device_experts import DeviceFeedForward
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.cuda.weights.rope_tables import head_order, rope_table
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.specification import AttentionSpecification, RopeSpecification
from edgeinfer_kernels.weights import FeedForwardWeights, LayerWeights, Matrix, Vector

RopeTables = dict[tuple[RopeSpecification | None, int], Tensor]
CACHE_ELEMENTS: dict[CacheType, torch.dtype] = {
    "f16": torch.float16, "q8_0": torch.int8, "q4_0": torch.int32
}  # fmt: skip
OrderedRows = tuple[Matrix, npt.NDArray[np.int64] | None]
"""A matrix, and the order of its rows within each head."""


@dataclass(frozen=True)
class Stack:
    """Stacked matrices, adjacent ones of one format merged; formats for at most two launches."""

    parts: tuple[DeviceMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.shapes.padded_rows for part in self.parts)


@dataclass(frozen=True)
class DeviceAttention:
    """One layer's attention on the device; vectors are None if they are not needed."""

    qkv: Stack
    output: DeviceMatrix
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    post_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    table: Tensor


@dataclass(frozen=True)
class DeviceCache:
    """One layer's keys and values and their scales (none for float16), in the layout of `cache_tiles.py`."""

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    @classmethod
    def take(
        cls, arena: Arena, facts: AttentionSpecification, positions: int, kind: CacheType
    ) -> "DeviceCache":
        dtype, width, scales = CACHE_ELEMENTS[kind], facts.head_dim, -(-facts.head_dim // 32)
        shape = (facts.kv_heads, positions, -(-width // 8) if kind == "q4_0" else width)
        groups = (facts.kv_heads, positions, scales) if kind != "f16" else (0,)
        keys, key_scales = arena.take(shape, dtype), arena.take(groups, torch.float16)
        values, value_scales = arena.take(shape, dtype), arena.take(groups, torch.float16)
        return cls(keys, key_scales, values, value_scales)

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Scales of keys and of values, if any."""
        if self.keys.dtype == torch.float16:
            return None, None
        return self.key_scales, self.value_scales

    def first(self, end: int) -> list[Tensor]:
        """Views of the first `end` positions."""
        tensors = (self.keys, self.key_scales, self.values, self.value_scales)
        return [tensor[:, :end] for tensor in tensors if tensor.dim() > 1]


class LayerBuilder:
    """Allocates the data of one layer from an arena, including vectors and tables, which `fill_vectors`
    uploads.

    Layers of the same `tables` share their RoPE tables.
    """

    def __init__(self, arena: Arena, positions: int, tables: RopeTables) -> None:
        self.positions = positions
        self._arena = arena
        self.tables = tables
        self._vectors: list[tuple[Tensor, npt.NDArray[Any]]] = []

    def _matrix(self, source: Matrix) -> DeviceMatrix:
        raise NotImplementedError

    def _stack(self, matrices: Sequence[OrderedRows]) -> Stack:
        """Matrices that are multiplied with the same rows."""
        raise NotImplementedError

    def fill_vectors(self) -> None:
        """Upload vectors and tables."""
        for tensor, values in self._vectors:
            tensor.copy_(torch.from_numpy(values))
        self._vectors.clear()

    def _vector(self, values: Vector | None, size: int = 0) -> Tensor | None:
        """The values in float32, zero-padded to `size`."""
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
            sinks=self._vector(w.attn_sinks),
            table=self._table(facts),
        )

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
        if key not in self.tables:
            table = rope_table(facts.rope, facts.head_dim, self.positions)
            tensor = self._arena.take(table.shape, torch.float32)
            self._vectors.append((tensor, table))
            self.tables[key] = tensor
        return self.tables[key]

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


def _reordered(vector: Vector | None, order: npt.NDArray[np.int64]) -> Vector | None:
    """A vector over heads with the dimensions of each head in their new order."""
    if vector is None:
        return None
    return np.ascontiguousarray(vector.reshape(-1, len(order))[:, order].reshape(-1))
