"""LoRA adapters on a device: what they add to the products of its matrices.

Matrices that share planes have one adapter, whose ranks are those of all. In a decode step, a·x is a
separate projection; the kernel that multiplies the matrix adds b·(a·x) to its sums. In a prompt both are
library matmuls.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, ROW_MULTIPLE, PlaneShapes, Tile
from edgeinfer_kernels.lora.weights import Floats, LoraError, LoraWeights, ModelLora
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_quant_formats import encode

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.weights.device_model import DeviceModel

BY_HEAD = (".attn_k_b.", ".attn_v_b.")
"""Parts of names of matrices whose heads are multiplied separately."""


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix of the file in planes: its first row there, and the order of its rows within each head."""

    source: int
    first_row: int
    rows: int
    order: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class DeviceLora:
    """The adapter of a matrix in planes.

    a: (ranks, columns) in planes, for steps; a_rows: the same in float16, for prompts; b: (padded rows,
    ranks) float32; products: a·x of the tokens of a step, float32.
    """

    a: DeviceMatrix
    a_rows: Tensor
    b: Tensor
    products: Tensor

    @property
    def ranks(self) -> int:
        return int(self.b.shape[1])

    def tile(self, tile: Tile) -> Tile:
        """The tile of the matrix with the adapter."""
        return tile._replace(rank=self.ranks)

    def add(self, rows: Tensor, out: Tensor) -> None:
        """out (tokens, outputs) float32 += rows (tokens, columns) float16 · (b·a) transposed."""
        if rows.is_cuda:
            products = torch.mm(rows, self.a_rows.t(), out_dtype=torch.float32)
        else:
            products = torch.mm(rows.float(), self.a_rows.float().t())
        out.addmm_(products, self.b[: out.shape[1]].t())


def device_lora(model: "DeviceModel", lora: ModelLora, device: torch.device) -> dict[int, DeviceLora]:
    """The adapters by the id of the `DeviceMatrix`. Raises `LoraError`: one that no kernel here reads."""
    if lora.embedding is not None:
        raise LoraError(f"{lora.embedding.name}: the embedding takes no adapter on a GPU")
    placed = {place.source for places in model.placed.values() for place in places}
    for key, weights in lora.matrices.items():
        by_head = any(part in weights.name for part in BY_HEAD)
        if key not in placed or key in model.in_floats or len(weights.a) > 1 or by_head:
            raise LoraError(f"{weights.name}: its kernel on a GPU takes no adapter")
    result = {}
    for key, places in model.placed.items():
        if any(place.source in lora.matrices for place in places):
            result[key] = _placed_lora(model.matrices[key], places, lora.matrices, device)
    return result


def _placed_lora(
    matrix: DeviceMatrix,
    places: Sequence[PlacedMatrix],
    adapters: Mapping[int, LoraWeights],
    device: torch.device,
) -> DeviceLora:
    found = [(place, adapters[place.source]) for place in places if place.source in adapters]
    ranks = -(-sum(each.rank for _, each in found) // ROW_MULTIPLE) * ROW_MULTIPLE
    a = np.zeros((ranks, matrix.shapes.columns), np.float32)
    b = np.zeros((matrix.shapes.padded_rows, ranks), np.float32)
    first = 0
    for place, each in found:
        a[first : first + each.rank] = each.a[0]
        rows = slice(place.first_row, place.first_row + place.rows)
        b[rows, first : first + each.rank] = _ordered(each.b[0], place.order)
        first += each.rank
    kind = "F32" if matrix.shapes.tile.code in FLOAT_CODES else "Q8_0"
    return DeviceLora(
        _in_planes(a, kind, device),
        torch.from_numpy(a).to(device, torch.float16),
        torch.from_numpy(b).to(device),
        torch.zeros((MAX_TOKENS, ranks), dtype=torch.float32, device=device),
    )


def _ordered(rows: Floats, order: npt.NDArray[np.int64] | None) -> Floats:
    """The rows in the order that they have on the device."""
    if order is None:
        return rows
    return rows.reshape(-1, len(order), rows.shape[1])[:, order].reshape(rows.shape)


def _in_planes(a: Floats, kind: str, device: torch.device) -> DeviceMatrix:
    """Rows in planes of a format."""
    shapes = PlaneShapes.of("lora_a", kind, *a.shape)
    parts = [
        torch.zeros(shape, dtype=torch.int32, device=device)
        for shape in (shapes.words, shapes.scales, shapes.super_scales)
    ]
    matrix = DeviceMatrix(shapes, kind, *parts)
    raw = encode(a.reshape(-1), kind).reshape(len(a), -1)
    matrix.fill(0, torch.from_numpy(np.ascontiguousarray(raw)).to(device))
    return matrix


def adapted(lora: Mapping[int, DeviceLora], matrices: Sequence[DeviceMatrix]) -> Iterator[DeviceLora]:
    """The adapters of some matrices."""
    for matrix in matrices:
        found = lora.get(id(matrix))
        if found is not None:
            yield found
