"""Experts of a divided mixture change places while it decodes: hot ones come to the device, cold ones leave.

Who is to come a policy says, which hears how often tokens asked for each expert: the host counts that at its
turns. An expert comes from the host's memory into the slot of the one that leaves, a few pieces a step: when
the step has been launched, on a stream of their own, each a copy and the recorded kernels that pack it. So no
other thread is in the way of those that compute. Between two steps the tables are changed that kernels look
experts up in: the one that leaves is the host's from before its slot is written, the one that comes is the
device's once it is there.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cpu.layout.fields import FIELDS, ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.packed_matrix import Bytes, expert_bytes, group_bytes
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import PlaneShapes
from edgeinfer_kernels.sizes.cuda_buffers import REFILL_BYTES
from edgeinfer_kernels.weights import ExpertWeights, Matrix

PIECES_PER_STEP = 3
"""Of experts on their way: a piece takes the host some 40 us."""
Counts = npt.NDArray[np.int64]


class Change(Protocol):
    """In `layer` (a row of the policy's), `expert` is to have the slot of `leaves`."""

    @property
    def layer(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def leaves(self) -> int: ...


class ExpertPolicy(Protocol):
    """Picks the experts that are on the device; see `runtime.expert_cache_policy` of the offload package."""

    @property
    def look_after(self) -> int:
        """Tokens from one look at what was asked for to the next."""
        ...

    def note(self, chosen: Counts) -> None:
        """`chosen` (layers, experts): how often each was chosen since the last time."""
        ...

    def proposals(self) -> Sequence[Any]:
        """Each `Change` to make now, one after the other."""
        ...

    def begin(self, swap: Any) -> None:
        """A change's slot is about to be written."""
        ...

    def land(self, swap: Any) -> None:
        """A change's slot holds its expert."""
        ...


class CountingHost(Protocol):
    """The host's half, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    @property
    def asked(self) -> Mapping[int, Counts]:
        """How often each expert was asked for, by layer."""
        ...

    def memory_of(self, matrix: Matrix) -> Bytes:
        """Where a matrix lies in the kernels' layout."""
        ...


class ExpertCacheLayer(NamedTuple):
    """What of a layer lies on the device, all of its weights, which are the host's too; the matrices gate, up
    and down in the host's memory, and how often each expert was asked for.
    """

    here: DeviceExperts
    weights: ExpertWeights
    memories: tuple[Tensor, Tensor, Tensor]
    asked: Counts

    @classmethod
    def of(
        cls, here: DeviceExperts, weights: ExpertWeights, asked: Counts, host: CountingHost
    ) -> "ExpertCacheLayer":
        """`weights` as the host has them."""
        gate, up, down = (
            torch.from_numpy(host.memory_of(stack))
            for stack in (weights.ffn_gate_exps, weights.ffn_up_exps, weights.ffn_down_exps)
        )
        return cls(here, weights, (gate, up, down), asked)


class Packer:
    """Some rows of a format on their way: (groups, bytes) as the host has them, sixteen together, become
    planes. Recorded once in the graphs' `pool`, as launching it one by one costs the host ten times as much.
    """

    def __init__(self, stack: Matrix, groups: int, device: torch.device, pool: Any) -> None:
        rows = ROWS_PER_GROUP * groups
        shapes = PlaneShapes.of(stack.name, stack.format, rows, stack.columns)
        parts = [
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (shapes.words, shapes.scales, shapes.supers)
        ]
        self.rows = rows
        self._raw = torch.zeros((groups, group_bytes(stack)), dtype=torch.uint8, device=device)
        self._packed = DeviceMatrix(shapes, stack.format, *parts)
        self._pack()
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._pack()
            self._graph = graph

    def _pack(self) -> None:
        self._packed.fill(0, rows_of_groups(self._raw, self._packed.format))

    def bring(self, groups: Tensor, target: DeviceMatrix, first_row: int) -> None:
        """`groups` of the host's memory to the rows from `first_row` on; on the current stream."""
        for part, there in self._packed_from(groups, target, first_row):
            there.copy_(part, non_blocking=True)

    def gives(self, groups: Tensor, target: DeviceMatrix, first_row: int) -> bool:
        """Whether `bring` would write what lies there."""
        return all(torch.equal(part, there) for part, there in self._packed_from(groups, target, first_row))

    def _packed_from(
        self, groups: Tensor, target: DeviceMatrix, first_row: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the planes, and where it belongs."""
        self._raw.copy_(groups, non_blocking=True)
        if self._graph is None:
            self._pack()
        else:
            self._graph.replay()
        for part, whole in zip(self._packed.parts, target.parts, strict=True):
            if part.numel():
                first = first_row * len(part) // self.rows
                yield part, whole[first : first + len(part)]


class _Piece(NamedTuple):
    """Groups of the host's memory that become rows of the device's from `first_row` on."""

    packer: Packer
    groups: Tensor
    target: DeviceMatrix
    first_row: int


class ExpertCache:
    """Carries out what `policy` says, whose rows are the `layers`. `ended`: why experts stay, the device not
    having the memory for it, or an expert that is there not coming out as it was loaded.
    """

    def __init__(
        self, layers: Sequence[ExpertCacheLayer], policy: ExpertPolicy, device: torch.device
    ) -> None:
        self._layers, self._policy, self._device = layers, policy, device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._arrived = torch.cuda.Event() if self._cuda else None
        self._seen = np.array([layer.asked for layer in layers])
        self._places = [self._copy_of(layer.here.places) for layer in layers]
        self._coming: Change | None = None
        self._pieces: list[_Piece] = []
        self._wanted: list[Change] = []
        self._tokens = 0
        self.changes = 0
        """Experts that have come."""
        self.ended: str | None = None
        self._packers: dict[tuple[str, int, int], Packer] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        try:
            for layer in layers:
                for stack, _, _ in self._stacks(layer):
                    for groups in set(self._steps(stack)):
                        self._take_packer(stack, groups)
            if not all(map(self._is_as_loaded, range(len(layers)))):
                self.ended = "packing them gave other weights than loading"
        except torch.OutOfMemoryError:
            self._packers.clear()
            self.ended = "the GPU has no memory left for those on their way"
        if self._cuda:
            torch.cuda.empty_cache()

    def _is_as_loaded(self, row: int) -> bool:
        """Whether the expert in the layer's first slot is packed as it was when it was loaded."""
        expert = int((self._places[row][0] == 0).nonzero()[0])
        pieces = self._pieces_of(row, expert, 0)
        return all(piece.packer.gives(piece.groups, piece.target, piece.first_row) for piece in pieces)

    def _copy_of(self, places: Tensor) -> Tensor:
        copy = torch.empty(places.shape, dtype=places.dtype, pin_memory=self._cuda)
        copy.copy_(places)
        return copy

    @staticmethod
    def _stacks(layer: ExpertCacheLayer) -> list[tuple[Matrix, Tensor, DeviceMatrix]]:
        """Gate, up and down: all experts of the host's, its memory, and those of the device."""
        here, w = layer.here, layer.weights
        stacks = w.ffn_gate_exps, w.ffn_up_exps, w.ffn_down_exps
        return list(zip(stacks, layer.memories, (here.gate, here.up, here.down), strict=True))

    @staticmethod
    def _steps(stack: Matrix) -> list[int]:
        """Groups of each piece of an expert's matrix."""
        group = group_bytes(stack)
        groups, most = expert_bytes(stack) // group, max(REFILL_BYTES // group, 1)
        return [min(most, groups - first) for first in range(0, groups, most)]

    def _take_packer(self, stack: Matrix, groups: int) -> None:
        key = stack.format, stack.columns, groups
        if key not in self._packers:
            self._packers[key] = Packer(stack, groups, self._device, self._pool)

    def before_step(self, tokens: int) -> None:
        """When a step is over, before the next one, of so many tokens: from now on who has come is here."""
        self._tokens += tokens
        if self._coming is not None:
            if self._pieces or not (self._arrived is None or self._arrived.query()):
                return
            come, self._coming = self._coming, None
            self._policy.land(come)
            self._tell(come.layer, come.expert, come.slot)
            self.changes += 1
        if self._wanted:
            self._coming = self._wanted.pop(0)
            self._policy.begin(self._coming)
            self._tell(self._coming.layer, self._coming.leaves, -1)
            come = self._coming
            self._pieces = list(self._pieces_of(come.layer, come.expert, come.slot))

    def _tell(self, row: int, expert: int, slot: int) -> None:
        """From the next step on the expert is in that slot of the device, -1: it is the host's."""
        places = self._places[row]
        places[0, expert], places[1, expert] = slot, -1 if slot >= 0 else expert
        self._layers[row].here.places.copy_(places, non_blocking=True)

    def beside_step(self) -> None:
        """When a step has been launched: what goes on beside it."""
        if self._coming is not None:
            self._bring(self._coming)
        elif not self._wanted and not self.ended and self._tokens >= self._policy.look_after:
            self._tokens = 0
            asked = np.array([layer.asked for layer in self._layers])
            self._policy.note(asked - self._seen)
            self._seen = asked
            self._wanted = list(self._policy.proposals())

    def _bring(self, change: Change) -> None:
        """The next pieces of who comes, behind the last of them its biases."""
        if not self._pieces:
            return
        if self._stream is None:
            self._launch(change)
            return
        main = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)  # a `with` takes several times as long
        try:
            self._launch(change)
        finally:
            torch.cuda.set_stream(main)

    def _launch(self, change: Change) -> None:
        now, self._pieces = self._pieces[:PIECES_PER_STEP], self._pieces[PIECES_PER_STEP:]
        for packer, groups, target, first_row in now:
            packer.bring(groups, target, first_row)
        if self._pieces:
            return
        here, w = self._layers[change.layer][:2]
        for held, values, stack in (
            (here.gate_bias, w.ffn_gate_exps_bias, w.ffn_gate_exps),
            (here.up_bias, w.ffn_up_exps_bias, w.ffn_up_exps),
            (here.down_bias, w.ffn_down_exps_bias, w.ffn_down_exps),
        ):
            if held is not None and values is not None:
                own = values.reshape(-1, stack.rows)[change.expert]
                held[change.slot * stack.rows :][: stack.rows].copy_(torch.from_numpy(own))
        if self._arrived is not None:
            self._arrived.record()

    def _pieces_of(self, row: int, expert: int, slot: int) -> Iterator[_Piece]:
        """An expert's matrices, cut, for a slot of its layer."""
        for stack, memory, target in self._stacks(self._layers[row]):
            group, first = group_bytes(stack), 0
            of_expert = memory[expert * expert_bytes(stack) :][: expert_bytes(stack)].view(-1, group)
            for count in self._steps(stack):
                packer = self._packers[stack.format, stack.columns, count]
                first_row = slot * stack.rows + first * ROWS_PER_GROUP
                yield _Piece(packer, of_expert[first : first + count], target, first_row)
                first += count

    def close(self) -> None:
        """Wait for what is under way."""
        if self._stream is not None:
            self._stream.synchronize()


def rows_of_groups(groups: Tensor, format_name: str) -> Tensor:
    """(groups, bytes) uint8 of sixteen rows each in the host's layout to (rows, bytes) as in a file."""
    index = _places_of_bytes(format_name, groups.device)
    blocks = groups.view(len(groups), -1, index.numel())
    return blocks[:, :, index].transpose(1, 2).reshape(ROWS_PER_GROUP * len(groups), -1)


@cache
def _places_of_bytes(format_name: str, device: torch.device) -> Tensor:
    """(16, bytes of a block): where in sixteen rows' block each row has its bytes."""
    row = np.arange(ROWS_PER_GROUP)[:, None]
    fields = []
    for field in FIELDS[format_name]:
        units, byte = np.divmod(np.arange(field.unit * field.count), field.unit)
        fields.append(ROWS_PER_GROUP * (field.offset + units * field.unit) + row * field.unit + byte)
    return torch.from_numpy(np.concatenate(fields, axis=1)).to(device)
