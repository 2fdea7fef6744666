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

from edgeinfer_kernels.cuda.prefill.expert_matmul import GroupedTile, grouped_product
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, ROW_MULTIPLE, PlaneShapes, Tile
from edgeinfer_kernels.lora.weights import Floats, LoraError, LoraWeights, ModelLora
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_quant_formats import encode

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.weights.device_model import DeviceModel

BY_HEAD = (".attn_k_b.", ".attn_v_b.")
"""Parts of names of matrices whose heads are multiplied separately."""


def check_adaptable(lora: ModelLora, *, streams: bool, gathers: bool) -> None:
    """Raise `LoraError` if a model takes no such adapters: it `streams` weights of the CPU to the GPU, or
    `gathers` active neurons.
    """
    if streams and (lora.matrices or lora.embedding):
        raise LoraError(
            "weights on the CPU are streamed to the GPU for prompts and take no adapter: pass it to load"
        )
    if gathers and lora.matrices:
        raise LoraError("layers that read active neurons only (sparse) take no adapter")


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix of the file in planes: its first row there, and the order of its rows within each head."""

    source: int
    first_row: int
    rows: int
    order: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class DeviceLora:
    """The adapter of a matrix in planes, or of the stacked matrices of `experts`.

    a: (ranks, columns) in planes, for steps, of all experts; a_rows: the same in float16, for prompts; b:
    (padded rows, ranks) float32; products: a·x of the tokens of a step or of their assignments, float32.
    """

    a: DeviceMatrix
    a_rows: Tensor
    b: Tensor
    products: Tensor
    experts: int = 1

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

    def add_floats(self, rows: Tensor, out: Tensor) -> None:
        """As `add`, of rows in float32: those of a router."""
        out.addmm_(torch.mm(rows, self.a_rows.float().t()), self.b[: out.shape[1]].t())

    def add_experts(
        self, rows: Tensor, index: Tensor | None, tiles: Tensor, tile: GroupedTile, out: Tensor
    ) -> None:
        """out (sorted rows, outputs) float32 += rows[index] float16 · (b·a) of their experts, transposed."""
        a = self.a_rows.view(self.experts, self.ranks, -1)
        b = self.b[: self.experts * out.shape[1]].to(torch.float16).view(self.experts, out.shape[1], -1)
        products = torch.zeros((len(out), self.ranks), dtype=torch.float32, device=out.device)
        grouped_product(rows, index, a, tiles, products, 0, tile)
        added = torch.zeros_like(out)
        grouped_product(products.to(torch.float16), None, b, tiles, added, 0, tile)
        out += added


@dataclass(frozen=True)
class EmbeddingLora:
    """The adapter of the embedding: a (rank, hidden_size) and b (vocabulary, rank), float32."""

    a: Tensor
    b: Tensor

    @classmethod
    def of(cls, weights: LoraWeights | None, device: torch.device) -> "EmbeddingLora | None":
        """The adapter on a device; None for None."""
        if weights is None:
            return None
        a, b = (torch.from_numpy(np.ascontiguousarray(each[0])).to(device) for each in (weights.a, weights.b))
        return cls(a, b)


def embedding_args(embedding: DeviceMatrix, lora: EmbeddingLora | None) -> tuple[tuple[Tensor, ...], Tile]:
    """The embedding as kernels take it, with its adapter, and its tile with the adapter's rank."""
    parts, tile = embedding.parts, embedding.shapes.tile
    return (parts, tile) if lora is None else ((*parts, lora.a, lora.b), tile._replace(rank=len(lora.a)))


def device_lora(model: "DeviceModel", lora: ModelLora, device: torch.device) -> dict[int, DeviceLora]:
    """The adapters by the id of the `DeviceMatrix`. Raises `LoraError`: one that no kernel here reads."""
    placed = {place.source for places in model.placed.values() for place in places}
    for key, weights in lora.matrices.items():
        by_head = any(part in weights.name for part in BY_HEAD)
        if key not in placed or by_head:
            raise LoraError(f"{weights.name}: its kernel on a GPU takes no adapter")
    result, stacks = {}, _expert_stacks(model)
    for key, places in model.placed.items():
        found = [lora.matrices[place.source] for place in places if place.source in lora.matrices]
        if found and key in stacks:
            result[key] = _lora_of_experts(model.matrices[key], found[0], stacks[key], device)
        elif found:
            result[key] = _placed_lora(model.matrices[key], places, lora.matrices, device)
    return result


def _expert_stacks(model: "DeviceModel") -> dict[int, int]:
    """The experts per token of the stacked matrices of experts, by id; 0: they are exchanged."""
    found = dict[int, int]()
    for weights in (block.weights for block in model.blocks if hasattr(block.weights, "stacks")):
        per_token = 0 if weights.has_expert_cache else weights.experts_per_token
        found |= {id(matrix): per_token for matrix in weights.stacks.matrices}
    return found


def _lora_of_experts(
    matrix: DeviceMatrix, weights: LoraWeights, experts_per_token: int, device: torch.device
) -> DeviceLora:
    """Raises `LoraError`: the experts on the device change."""
    if not experts_per_token:
        raise LoraError(f"{weights.name}: experts that are exchanged with the CPU's take no adapter")
    missing = -weights.rank % ROW_MULTIPLE
    a = np.pad(weights.a, ((0, 0), (0, missing), (0, 0))).reshape(-1, weights.a.shape[2])
    b = np.pad(weights.b, ((0, 0), (0, 0), (0, missing))).reshape(-1, weights.rank + missing)
    kind = "F32" if matrix.shapes.tile.code in FLOAT_CODES else "Q8_0"
    return DeviceLora(
        _in_planes(a, kind, device),
        torch.from_numpy(a).to(device, torch.float16),
        torch.from_numpy(b).to(device),
        torch.zeros((MAX_TOKENS * experts_per_token, b.shape[1]), dtype=torch.float32, device=device),
        len(weights.a),
    )


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
