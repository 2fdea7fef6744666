"""Reorders the neurons of a feed-forward: the function and the bytes are the same, only their order changes.

Neuron n is row n of gate and up, element n of their biases and column n of down. Columns of a quantized down
move in whole blocks, so that nothing is encoded again.
"""

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.formats import FormatSpec
from edgeinfer_quant_formats.gguf.reader import GGUFFile
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.quantizing import QuantizationPlan, TensorPlan

NEURON_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(up|gate|down)\.(weight|bias)")
Order = NDArray[np.int64]


def hottest_first(counts: NDArray[np.integer], block: int) -> Order:
    """The order of blocks of `block` neurons by falling counts; the order within a block doesn't change (with
    a block of 1, every neuron moves separately).
    """
    sums = counts.astype(np.int64).reshape(-1, block).sum(axis=1)
    blocks = np.argsort(-sums, kind="stable")
    return (blocks[:, None] * block + np.arange(block)).reshape(-1)


def neurons_per_block(file: GGUFFile, layer: int) -> int:
    """Number of neurons that can only move together: those of a block of down.

    Raises:
        FormatError: no such layer, or an MoE layer, whose neurons are counted separately.
    """
    name = f"blk.{layer}.ffn_down.weight"
    if name not in file.tensors:
        raise FormatError(f"{printable(file.path)}: no {name}; only dense feed-forwards can be reordered")
    return file.tensors[name].format.block_elements


class ReorderedFile(GGUFFile):
    """A view of an open file with its neurons in `orders`, per layer; the source file stays open.

    Raises:
        FormatError: an order that doesn't fit its layer.
    """

    def __init__(self, file: GGUFFile, orders: Mapping[int, Order]) -> None:
        super().__init__(file._parts)
        self._orders = orders
        self._last: tuple[str, NDArray[np.uint8]] | None = None
        for layer, order in orders.items():
            self._check(layer, order)

    def _check(self, layer: int, order: Order) -> None:
        columns = self.tensors[f"blk.{layer}.ffn_down.weight"].shape[-1]
        if not np.array_equal(np.sort(order), np.arange(columns)):
            raise FormatError(
                f"{printable(self.path)}: order of {len(order)} neurons for layer {layer}, "
                f"wanted each of its {columns} once"
            )

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor with its neurons in the new order; the last tensor is cached."""
        match = NEURON_TENSOR.fullmatch(name)
        if match is None or int(match[1]) not in self._orders or f"{match[2]}.{match[3]}" == "down.bias":
            return super().raw(name)
        if self._last is None or self._last[0] != name:
            order, raw = self._orders[int(match[1])], super().raw(name)
            is_down = match[2] == "down"
            self._last = (
                name,
                _moved_columns(raw, self.tensors[name].format, order)
                if is_down
                else _moved_rows(raw, self.tensors[name], order),
            )
        return self._last[1]


def _moved_rows(raw: NDArray[np.uint8], info: TensorInfo, order: Order) -> NDArray[np.uint8]:
    """Reordered rows of a matrix, of a fused gate and up, or elements of a bias."""
    if len(info.shape) == 1:
        return np.ascontiguousarray(_moved_columns(raw, info.format, order))
    parts = raw.reshape(-1, len(order), raw.shape[-1])
    return np.ascontiguousarray(parts[:, order].reshape(raw.shape))


def _moved_columns(raw: NDArray[np.uint8], spec: FormatSpec, order: Order) -> NDArray[np.uint8]:
    blocks = raw.reshape(*raw.shape[:-1], -1, spec.block_bytes)
    block_order = order[:: spec.block_elements] // spec.block_elements
    return np.ascontiguousarray(blocks[..., block_order, :].reshape(raw.shape))


def reordered_plan(plan: QuantizationPlan, orders: Mapping[int, Order]) -> QuantizationPlan:
    """The plan with the importance of down's columns in the new order."""
    return QuantizationPlan(
        plan.mix,
        plan.model,
        tuple(_reordered(each, orders) for each in plan.tensors),
        plan.without_importance,
    )


def _reordered(tensor: TensorPlan, orders: Mapping[int, Order]) -> TensorPlan:
    match = NEURON_TENSOR.fullmatch(tensor.info.name)
    if tensor.importance is None or match is None or match[2] != "down" or int(match[1]) not in orders:
        return tensor
    importance = tensor.importance[:, orders[int(match[1])]]
    return TensorPlan(tensor.info, tensor.target, tensor.requested, importance)
