"""The expert cache: the experts of a split MoE model on the GPU change during decode, by request counts.

The cache policy picks the experts to load, from per-expert request counts, which the host counts in its CPU
stages. An expert is copied from host memory into the slot of the evicted one, a few pieces per step. After
the step has been launched, each piece is copied on a separate stream and packed by captured kernels. So no
additional thread competes with the compute threads. Between two steps the lookup tables of the kernels are
updated: the evicted expert belongs to the host before its slot is written, the loaded one belongs to the
device once it is complete.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.cpu.layout.fields import FIELDS, ROWS_PER_GROUP, SIX_BIT_BYTES
from edgeinfer_kernels.cpu.layout.packed_matrix import expert_bytes, group_bytes, kernel_format
from edgeinfer_kernels.cuda.current_device import capturing
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes
from edgeinfer_kernels.sizes.cuda_buffers import EXPERT_LOAD_BYTES

PIECES_PER_STEP = 3
"""Pieces of experts copied per step: a piece costs the host about 40 us."""
Counts = npt.NDArray[np.int64]


class Change(Protocol):
    """In `layer` (a row of the policy), `expert` replaces `evicted` in its slot."""

    @property
    def layer(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def evicted(self) -> int: ...


class ExpertPolicy(Protocol):
    """Picks the experts that are on the device; see `runtime.expert_cache_policy` of the offload package."""

    @property
    def check_interval(self) -> int:
        """Number of tokens between two checks of the request counts."""
        ...

    def record(self, requests: Counts) -> None:
        """Add `requests` (layers, experts): request counts since the last call."""
        ...

    def proposals(self) -> Sequence[Any]:
        """Each `Change` to make now, in order."""
        ...

    def begin(self, swap: Any) -> None:
        """The slot of a change will be written next."""
        ...

    def finish_swap(self, swap: Any) -> None:
        """The slot of a change holds its expert."""
        ...


class CountingHost(Protocol):
    """The CPU shard, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    @property
    def requests(self) -> Mapping[int, Counts]:
        """Request counts of each expert, by layer."""
        ...

    def memory_of(self, matrix: Matrix) -> Bytes:
        """The bytes of a matrix in the kernel layout."""
        ...


class ExpertCacheLayer(NamedTuple):
    """A layer with an expert cache: its part on the device, all its weights, the stacked matrices of the
    experts (`MoeWeights.stacks`) in host memory, and the request counts of the experts.
    """

    here: DeviceExperts
    weights: MoeWeights
    memories: tuple[Tensor, ...]
    requests: Counts

    @classmethod
    def of(
        cls, here: DeviceExperts, weights: MoeWeights, requests: Counts, host: CountingHost
    ) -> "ExpertCacheLayer":
        """`weights` in the layout of the host."""
        memories = tuple(torch.from_numpy(host.memory_of(stack)) for stack in weights.stacks())
        return cls(here, weights, memories, requests)


class Packer:
    """Converts rows of a format from the host layout, (groups, bytes) with sixteen rows per group, to planes.

    It is captured once in the graphs' `pool`, because launching the kernels one by one costs the host ten
    times as much.
    """

    def __init__(self, stack: Matrix, groups: int, device: torch.device, pool: Any) -> None:
        rows = ROWS_PER_GROUP * groups
        shapes = PlaneShapes.of(stack.name, stack.format, rows, stack.columns)
        parts = [
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (shapes.words, shapes.scales, shapes.super_scales)
        ]
        self.rows = rows
        self._raw = torch.zeros((groups, group_bytes(stack)), dtype=torch.uint8, device=device)
        self._packed = DeviceMatrix(shapes, kernel_format(stack), *parts)
        self._pack()
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with capturing(device, graph, pool):
                self._pack()
            self._graph = graph

    def _pack(self) -> None:
        self._packed.fill(0, rows_of_groups(self._raw, self._packed.format))

    def load_groups(self, groups: Tensor, target: DeviceMatrix, first_row: int, factor: float = 1.0) -> None:
        """Load `groups` of host memory, times `factor`, into the rows from `first_row` on; on the current
        stream.
        """
        for part, there in self._packed_from(groups, target, first_row, factor):
            there.copy_(part, non_blocking=True)

    def is_identical(self, groups: Tensor, target: DeviceMatrix, first_row: int, factor: float = 1.0) -> bool:
        """Whether `load_groups` would write exactly the current content."""
        packed = self._packed_from(groups, target, first_row, factor)
        return all(torch.equal(part, there) for part, there in packed)

    def _packed_from(
        self, groups: Tensor, target: DeviceMatrix, first_row: int, factor: float
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the planes, and its destination."""
        self._raw.copy_(groups, non_blocking=True)
        if self._graph is None:
            self._pack()
        else:
            self._graph.replay()
        if factor != 1:
            self._packed.set_factors(0, self.rows, factor)
        for part, whole in zip(self._packed.parts, target.parts, strict=True):
            if part.numel():
                first = first_row * len(part) // self.rows
                yield part, whole[first : first + len(part)]


class _Piece(NamedTuple):
    """Groups in host memory that become, times `factor`, the device's rows from `first_row` on."""

    packer: Packer
    groups: Tensor
    target: DeviceMatrix
    first_row: int
    factor: float


class ExpertCache:
    """Executes the decisions of `policy`, whose rows are the `layers`. `ended`: the reason why experts no
    longer change: not enough device memory, or a packed expert that differs from the loaded one.
    """

    def __init__(
        self, layers: Sequence[ExpertCacheLayer], policy: ExpertPolicy, device: torch.device
    ) -> None:
        self._layers, self._policy, self._device = layers, policy, device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._arrived = torch.cuda.Event() if self._cuda else None
        self._seen = np.array([layer.requests for layer in layers])
        self._slots = [self._copy_of(layer.here.slots) for layer in layers]
        self._loading: Change | None = None
        self._pieces: list[_Piece] = []
        self._pending: list[Change] = []
        self._tokens = 0
        self.changes = 0
        """Number of loaded experts."""
        self.ended: str | None = None
        self._packers: dict[tuple[str, int, int], Packer] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        try:
            for layer in layers:
                for stack, _, _ in self._stacks(layer):
                    for groups in set(self._steps(stack)):
                        self._take_packer(stack, groups)
            if not all(map(self._is_as_loaded, range(len(layers)))):
                self.ended = "loading them into a slot gave other weights"
        except torch.OutOfMemoryError:
            self._packers.clear()
            self.ended = "the GPU has no memory left for the copies"
        if self._cuda:
            torch.cuda.empty_cache()

    def _is_as_loaded(self, row: int) -> bool:
        """Whether the expert in the layer's first slot is packed identically to when it was loaded."""
        expert = int((self._slots[row][0] == 0).nonzero()[0])
        pieces = self._pieces_of(row, expert, 0)
        return all(packer.is_identical(*where) for packer, *where in pieces)

    def _copy_of(self, slots: Tensor) -> Tensor:
        copy = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=self._cuda)
        copy.copy_(slots)
        return copy

    @staticmethod
    def _stacks(layer: ExpertCacheLayer) -> list[tuple[Matrix, Tensor, DeviceMatrix]]:
        """Up, down and gate: all experts in the file, the host memory, and the device matrix."""
        here = layer.here
        there = [here.up, here.down, *([] if here.gate is None else [here.gate])]
        return list(zip(layer.weights.stacks(), layer.memories, there, strict=True))

    @staticmethod
    def _steps(stack: Matrix) -> list[int]:
        """Group count of each piece of an expert's matrix."""
        group = group_bytes(stack)
        groups, max_groups = expert_bytes(stack) // group, max(EXPERT_LOAD_BYTES // group, 1)
        return [min(max_groups, groups - first) for first in range(0, groups, max_groups)]

    def _take_packer(self, stack: Matrix, groups: int) -> None:
        key = stack.format, stack.columns, groups
        if key not in self._packers:
            self._packers[key] = Packer(stack, groups, self._device, self._pool)

    def before_step(self, tokens: int) -> None:
        """Called between steps, before the next step of `tokens` tokens: experts that are complete become
        usable.
        """
        self._tokens += tokens
        if self._loading is not None:
            if self._pieces or not (self._arrived is None or self._arrived.query()):
                return
            loaded, self._loading = self._loading, None
            self._policy.finish_swap(loaded)
            self._set_slot(loaded.layer, loaded.expert, loaded.slot)
            self.changes += 1
        if self._pending:
            self._loading = self._pending.pop(0)
            self._policy.begin(self._loading)
            self._set_slot(self._loading.layer, self._loading.evicted, -1)
            loading = self._loading
            self._pieces = list(self._pieces_of(loading.layer, loading.expert, loading.slot))

    def _set_slot(self, row: int, expert: int, slot: int) -> None:
        """From the next step on, the expert is in that slot of the device; -1: on the host."""
        slots = self._slots[row]
        slots[0, expert], slots[1, expert] = slot, -1 if slot >= 0 else expert
        self._layers[row].here.slots.copy_(slots, non_blocking=True)

    def after_launch(self) -> None:
        """Called after a step has been launched: work that overlaps with it."""
        if self._loading is not None:
            self._load_piece(self._loading)
        elif not self._pending and not self.ended and self._tokens >= self._policy.check_interval:
            self._tokens = 0
            requests = np.array([layer.requests for layer in self._layers])
            self._policy.record(requests - self._seen)
            self._seen = requests
            self._pending = list(self._policy.proposals())

    def _load_piece(self, change: Change) -> None:
        """Copy the next pieces of an expert; after the last one, its biases."""
        if not self._pieces:
            return
        if self._stream is None:
            self._launch(change)
            return
        main = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)  # A `with` block takes several times as long.
        try:
            self._launch(change)
        finally:
            torch.cuda.set_stream(main)

    def _launch(self, change: Change) -> None:
        now, self._pieces = self._pieces[:PIECES_PER_STEP], self._pieces[PIECES_PER_STEP:]
        for packer, *where in now:
            packer.load_groups(*where)
        if self._pieces:
            return
        here, w = self._layers[change.layer][:2]
        for held, values, stack in (
            (here.gate_bias, w.ffn_gate_exps_bias, w.ffn_up_exps),
            (here.up_bias, w.ffn_up_exps_bias, w.ffn_up_exps),
            (here.down_bias, w.ffn_down_exps_bias, w.ffn_down_exps),
        ):
            if held is not None and values is not None:
                own = values.reshape(-1, stack.rows)[change.expert]
                held[change.slot * stack.rows :][: stack.rows].copy_(torch.from_numpy(own))
        if self._arrived is not None:
            self._arrived.record()

    def _pieces_of(self, row: int, expert: int, slot: int) -> Iterator[_Piece]:
        """The pieces of an expert's matrices, for a slot of its layer."""
        for stack, memory, target in self._stacks(self._layers[row]):
            group, first = group_bytes(stack), 0
            factor = 1.0 if stack.scales is None else float(stack.scales[expert])
            of_expert = memory[expert * expert_bytes(stack) :][: expert_bytes(stack)].view(-1, group)
            for count in self._steps(stack):
                packer = self._packers[stack.format, stack.columns, count]
                first_row = slot * stack.rows + first * ROWS_PER_GROUP
                yield _Piece(packer, of_expert[first : first + count], target, first_row, factor)
                first += count

    def close(self) -> None:
        """Wait for running copies."""
        if self._stream is not None:
            self._stream.synchronize()


def rows_of_groups(groups: Tensor, format_name: str) -> Tensor:
    """Convert (groups, bytes) uint8 of sixteen rows each in host layout to (rows, bytes) in file layout."""
    index = _slots_of_bytes(format_name, groups.device)
    blocks = groups.view(len(groups), -1, index.numel())
    rows = blocks[:, :, index].transpose(1, 2)
    if format_name == "Q6_K":
        rows = torch.cat((_file_codes(rows[..., :SIX_BIT_BYTES]), rows[..., SIX_BIT_BYTES:]), dim=-1)
    return rows.reshape(ROWS_PER_GROUP * len(groups), -1)


def _file_codes(packed: Tensor) -> Tensor:
    """The codes (…, SIX_BIT_BYTES) of Q6_K blocks as in the file, from those that `pack_six_bits` writes."""
    first, second, third = packed.unflatten(-1, (2, 3, 32)).unbind(-2)
    last = first >> 6 | second >> 6 << 2 | third >> 6 << 4
    low = torch.stack((first & 15 | (third & 15) << 4, second & 15 | (last & 15) << 4), dim=-2)
    high = first >> 4 & 3 | (second >> 4 & 3) << 2 | (third >> 4 & 3) << 4 | last >> 4 << 6
    return torch.cat((low.flatten(-3), high.flatten(-2)), dim=-1)


@cache
def _slots_of_bytes(format_name: str, device: torch.device) -> Tensor:
    """(16, bytes of a block): offsets of each row's bytes in a block of sixteen rows."""
    row = np.arange(ROWS_PER_GROUP)[:, None]
    fields = []
    for field in FIELDS[format_name]:
        units, byte = np.divmod(np.arange(field.unit * field.count), field.unit)
        fields.append(ROWS_PER_GROUP * (field.offset + units * field.unit) + row * field.unit + byte)
    return torch.from_numpy(np.concatenate(fields, axis=1)).to(device)
