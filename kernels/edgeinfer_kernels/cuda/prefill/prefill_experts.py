"""Prefill MoE: the tokens of a chunk are grouped by expert, so each expert's matrices are used once.

The host needs the token-expert assignments, so it waits for them once per layer. The CPU computes its
experts, or the weights of those with tokens are streamed to the GPU. Several experts are computed at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.runtime.abi import ELSEWHERE
from edgeinfer_kernels.cuda.blocks.moe_weights import DeviceExperts, ExpertStacks, RoutingSpace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from edgeinfer_kernels.cuda.prefill.expert_kernels import GATINGS, select_experts_kernel
from edgeinfer_kernels.cuda.prefill.expert_matmul import (
    ExpertRows,
    add_experts,
    grouped_product,
    grouped_tile,
)
from edgeinfer_kernels.cuda.prefill.grouped_kernels import dequantize_experts_kernel, group_assignments_kernel
from edgeinfer_kernels.cuda.prefill.prefill_matmul import DEQUANTIZED_BLOCKS, DEQUANTIZING_WARPS, Products
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, activation_rows
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import DecoderSpec

ASSIGNMENTS_PER_STEP = 1024
"""Assignments that a program processes together."""


@dataclass(frozen=True)
class _Batch:
    """Experts that are computed together: their slots within `stacks`, and their sorted rows."""

    stacks: ExpertStacks
    first_slot: int
    """Slot of the first expert of the stacks."""
    experts: tuple[int, ...]
    counts: tuple[int, ...]
    first: int

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def tiles(self, rows: int) -> list[tuple[int, int, int]]:
        """(index of the expert in the batch, first row, end of the expert's rows) of tiles of `rows` rows,
        counted from `first`.
        """
        rows_of_tiles, end = [], 0
        for number, count in enumerate(self.counts):
            begin, end = end, end + count
            rows_of_tiles += [(number, row, end) for row in range(begin, end, rows)]
        return rows_of_tiles


class PrefillExperts:
    """Computes MoE blocks for chunks of at most `chunk` tokens; buffers come from the arena."""

    def __init__(self, spec: DecoderSpec, products: Products, arena: Arena, capability: int) -> None:
        chunk = products.chunk
        self._tile = grouped_tile(capability)
        self._routing = RoutingSpace(spec.specs(MoeSpec), arena, chunk)
        self._products, self._width = products, spec.hidden_size
        needed = chunk if self._routing.experts_per_token else 0
        self._assignments = arena.take((4, chunk * self._routing.experts_per_token), torch.int32)
        self._counts = arena.take((2 * self._routing.count,), torch.int32)
        pinned = self._counts.is_cuda
        self._host_counts = torch.zeros(2 * self._routing.count, dtype=torch.int32, pin_memory=pinned)
        self._counted = torch.cuda.Event() if pinned else None
        self._floats = arena.take((needed, self._width), torch.float32)
        self._sum = arena.take((needed, self._width), torch.float32)
        self._scales = arena.take((products.expert_rows,), torch.float32)

    def score(self, w: DeviceExperts, rows: Tensor) -> None:
        """Compute the router's scores of these rows."""
        scores = self._routing.scores[: len(rows), : w.count]
        torch.mm(rows, w.router_rows.t(), out=scores)
        if w.router_bias is not None:
            scores += w.router_bias[: w.count]

    def read(
        self,
        spec: MoeSpec,
        w: DeviceExperts,
        h: ScaledRows,
        sent: ExpertStacks | None = None,
        send: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Σ weight · expert(h) of the experts on the device, plus the shared expert: (tokens, hidden_size)
        float32.

        Includes the CPU's experts if they are `sent` (streamed). If the CPU computes its experts itself,
        `send` is called with the slots of the selected experts on the CPU, and their weights.
        """
        tokens = len(h.rows)
        floats = self._floats[:tokens]
        floats.copy_(h.rows)
        floats *= h.scales[:, None]
        if not spec.pre_attention_router:
            self.score(w, floats)
        self._choose(spec, w, tokens)
        assigned = tokens * spec.experts_per_token
        ids, weights = self._routing.ids[:assigned], self._routing.weights[:assigned]
        if send is not None:
            there = w.slots[1][ids]
            send(torch.where(there < 0, ELSEWHERE - ids, there), weights)
        assignments = self._group(spec, w, ids, weights)
        total = self._sum[:tokens].zero_()
        if w.shared is not None:
            y, scales = self._products.dense(spec.activation, w.shared, h)
            if w.shared_router_rows is not None:
                scales = scales * torch.sigmoid(floats @ w.shared_router_rows[0])
            torch.mul(y, scales[:, None], out=total)
        if w.here or sent:
            self._add_selected(spec, w, assignments, h, sent, total)
        return total

    def _choose(self, spec: MoeSpec, w: DeviceExperts, tokens: int) -> None:
        space = self._routing
        select_experts_kernel[(tokens,)](
            space.scores, space.scores.stride(0), space.ids, space.weights,
            space.scores if w.selection_bias is None else w.selection_bias, spec.scale,
            COUNT=spec.experts, EXPERTS_PER_TOKEN=spec.experts_per_token, GATING=GATINGS[spec.gating],
            NORMALIZED=spec.normalized, BIASED=w.selection_bias is not None,
            DEPENDENT=False, num_warps=1,
        )  # fmt: skip

    def _group(self, spec: MoeSpec, w: DeviceExperts, ids: Tensor, weights: Tensor) -> ExpertRows:
        """Sort the assignments by slot; start the copy of the counts per slot to the host."""
        count = len(ids)
        slots, positions, tokens, row_slots = (each[:count] for each in self._assignments)
        if w.has_expert_cache:
            self._counts.zero_()  # Slots without an expert are not written by the kernel.
        group_assignments_kernel[(w.count,)](
            ids, w.slots, slots, positions, tokens, row_slots, self._counts, count, w.here,
            EXPERTS=w.count, EXPERTS_PER_TOKEN=spec.experts_per_token, STEP=ASSIGNMENTS_PER_STEP, num_warps=4,
        )  # fmt: skip
        self._host_counts.copy_(self._counts, non_blocking=True)
        if self._counted is not None:
            self._counted.record()
        return ExpertRows(slots, weights, positions, tokens, row_slots)

    def _add_selected(
        self,
        spec: MoeSpec,
        w: DeviceExperts,
        assignments: ExpertRows,
        h: ScaledRows,
        sent: ExpertStacks | None,
        total: Tensor,
    ) -> None:
        if self._counted is not None:
            self._counted.synchronize()
        counts = self._host_counts[: w.all_slots].tolist()
        batches = list(self._batches(counts, w.stacks, 0)) if w.here else []
        if sent is not None:
            batches += self._batches(counts, sent, w.here)
        tiles = [batch.tiles(self._tile.rows) for batch in batches]
        experts = [batch.experts for batch in batches]
        # One transfer to the device for all tables of the layer.
        numbers = [*chain.from_iterable(chain.from_iterable(tiles)), *chain.from_iterable(experts)]
        table = torch.tensor(numbers, dtype=torch.int32).to(h.rows.device, non_blocking=True)
        at_tile, at_expert = 0, 3 * sum(map(len, tiles))
        for batch, tile in zip(batches, tiles, strict=True):
            shown = table[at_tile : at_tile + 3 * len(tile)].view(-1, 3)
            which = table[at_expert : at_expert + len(batch.experts)]
            at_tile, at_expert = at_tile + shown.numel(), at_expert + len(batch.experts)
            self._add_batch(spec, batch, assignments, h, shown, which, total)

    def _batches(self, counts: Sequence[int], stacks: ExpertStacks, first_slot: int) -> Iterator[_Batch]:
        """Batches of experts with tokens, as large as the row and weight buffers allow; `counts`: assignments
        per slot.
        """
        max_experts = min(self._experts_at_once(stacks, m) for m in stacks.matrices)
        max_rows = self._products.expert_rows
        at = sum(counts[:first_slot])
        first = at
        experts: list[int] = []
        taken: list[int] = []
        for expert in range(stacks.count):
            count = counts[first_slot + expert]
            if count and experts and (len(experts) == max_experts or sum(taken) + count > max_rows):
                yield _Batch(stacks, first_slot, tuple(experts), tuple(taken), first)
                first, experts, taken = at, [], []
            if count:
                experts.append(expert)
                taken.append(count)
            at += count
        if experts:
            yield _Batch(stacks, first_slot, tuple(experts), tuple(taken), first)

    @property
    def _sender(self) -> WeightStreamer:
        assert self._products.sender is not None, "there is a sender where anything is sent"
        return self._products.sender

    def _experts_at_once(self, stacks: ExpertStacks, matrix: DeviceMatrix) -> int:
        """How many experts' rows fit the scratch, and a transfer piece if streamed; at least 1."""
        rows, columns = _expert_shape(stacks, matrix)
        max_experts = len(self._products.scratch) // (rows * columns)
        if isinstance(matrix, StreamedMatrix):
            max_experts = min(max_experts, self._sender.piece_bytes // matrix.expert_bytes)
        return max(max_experts, 1)

    def _add_batch(
        self,
        spec: MoeSpec,
        batch: _Batch,
        assignments: ExpertRows,
        h: ScaledRows,
        tiles: Tensor,
        experts: Tensor,
        total: Tensor,
    ) -> None:
        stacks, count, products = batch.stacks, batch.rows, self._products
        hidden, _ = _expert_shape(stacks, stacks.up)
        index = assignments.tokens[batch.first : batch.first + count]
        scales = torch.index_select(h.scales, 0, index, out=self._scales[:count])
        both = products.floats(2, count, hidden)
        biases = stacks.up_bias, stacks.gate_bias
        for matrix, bias, out in zip((stacks.up, stacks.gate), biases, both, strict=True):
            if matrix is None:
                continue
            self._multiply(batch, matrix, h.rows, index, tiles, experts, out)
            if bias is not None:
                of_row = assignments.row_slots[batch.first : batch.first + count] - batch.first_slot
                out += bias.view(-1, hidden)[of_row] / scales[:, None]
        inner = products.hidden(count, hidden)
        gate = None if stacks.gate is None else both[1]
        activation_rows(gate, both[0], None, None, scales, spec.activation, inner.rows, inner.scales)
        y = products.floats(count, self._width)
        self._multiply(batch, stacks.down, inner.rows, None, tiles, experts, y)
        add_experts(
            y, inner.scales, stacks.down_bias, assignments, total, batch.first, count, batch.first_slot
        )

    def _multiply(
        self,
        batch: _Batch,
        matrix: DeviceMatrix,
        rows: Tensor,
        index: Tensor | None,
        tiles: Tensor,
        experts: Tensor,
        out: Tensor,
    ) -> None:
        """out (rows of the batch, rows of an expert) float32 = rows[index] · the expert's transposed."""
        matrix_rows, columns = _expert_shape(batch.stacks, matrix)
        step = min(matrix_rows, self._products.rows_at_once(columns))
        if isinstance(matrix, StreamedMatrix):
            step = min(step, self._sender.piece_bytes // matrix.group_bytes * ROWS_PER_GROUP)
        for first in range(0, matrix_rows, step):
            count = min(step, matrix_rows - first)
            weights = self._products.scratch[: len(batch.experts) * count * columns]
            if isinstance(matrix, StreamedMatrix):
                self._send(matrix, batch.experts, first, weights.view(-1, columns))
            else:
                shapes = matrix.shapes
                grid = (
                    -(-shapes.blocks // DEQUANTIZED_BLOCKS),
                    -(-count // ROWS_PER_GROUP),
                    len(batch.experts),
                )
                dequantize_experts_kernel[grid](
                    matrix.parts, experts, weights, matrix_rows, first, count,
                    COLUMNS=columns, BLOCKS=shapes.blocks, STEP=DEQUANTIZED_BLOCKS, TILE=shapes.tile,
                    num_warps=DEQUANTIZING_WARPS,
                )  # fmt: skip
            grouped_product(rows, index, weights.view(-1, count, columns), tiles, out, first, self._tile)

    def _send(self, matrix: StreamedMatrix, experts: Sequence[int], first: int, weights: Tensor) -> None:
        """Stream the experts' rows from `first` on as float16, (experts · rows, columns); adjacent ones in
        one copy.
        """
        rows = len(weights) // len(experts)
        begin, nbytes = (n // ROWS_PER_GROUP * matrix.group_bytes for n in (first, rows))
        spans: list[tuple[int, int]] = []
        for expert in experts:
            at = expert * matrix.expert_bytes + begin
            if spans and spans[-1][1] == at:
                spans[-1] = spans[-1][0], at + nbytes
            else:
                spans.append((at, at + nbytes))
        raw = self._sender.send(matrix.memory, spans)
        unpack(raw, matrix.format, matrix.shapes.columns, weights)
        self._sender.done()


def _expert_shape(stacks: ExpertStacks, matrix: DeviceMatrix) -> tuple[int, int]:
    """Rows and columns of one expert's matrix."""
    experts = 1 if isinstance(matrix, StreamedMatrix) else stacks.count
    return matrix.shapes.rows // experts, matrix.shapes.columns
