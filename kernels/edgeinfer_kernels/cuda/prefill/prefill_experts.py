"""Prefill MoE: the tokens of a chunk are grouped by expert, so each expert's matrices are used once.

Experts on the GPU are multiplied as they are stored. The CPU computes its experts, or the weights of those
with tokens are streamed to the GPU, several at a time; the host then waits for the assignments, once per
layer, and also if the results of all of them don't fit the buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.neuron_layout import ColumnLayout
from edgeinfer_kernels.cpu.runtime.abi import ELSEWHERE
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.lora import adapted
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from edgeinfer_kernels.cuda.prefill.expert_kernels import GATINGS, select_experts_kernel
from edgeinfer_kernels.cuda.prefill.expert_matmul import (
    ExpertRows,
    ExpertTile,
    add_experts,
    expert_product,
    expert_tile,
    grouped_product,
    grouped_tile,
    sorted_tiles,
)
from edgeinfer_kernels.cuda.prefill.grouped_kernels import group_assignments_kernel
from edgeinfer_kernels.cuda.prefill.prefill_matmul import Products
from edgeinfer_kernels.cuda.prefill.prefill_rows import (
    ScaledRows,
    activation_rows,
    norm_rows,
    scale_rows,
    warps_for,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.layer_output_kernels import add_normed_kernel
from edgeinfer_kernels.cuda.triton_ops.neuron_unpacking import unpack_neuron_columns, unpack_neuron_rows
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts, ExpertStacks, RoutingSpace
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
        """(slot of the expert, or its index in the batch if it is streamed, first row, end of the expert's
        rows) of tiles of `rows` rows, counted from `first`.
        """
        rows_of_tiles, end = [], 0
        for number, count in enumerate(self.counts):
            begin, end = end, end + count
            expert = number if _is_streamed(self.stacks) else self.experts[number]
            rows_of_tiles += [(expert, row, end) for row in range(begin, end, rows)]
        return rows_of_tiles


class _TiledRows(NamedTuple):
    """Sorted rows from `first` on, and their tiles. `tile`: the config of experts on the GPU; `experts`:
    those of a streamed batch.
    """

    stacks: ExpertStacks
    first_slot: int
    first: int
    rows: int
    tiles: Tensor
    tile: ExpertTile
    experts: tuple[int, ...] = ()


class PrefillExperts:
    """Computes MoE blocks for chunks of at most `chunk` tokens; buffers come from the arena."""

    def __init__(self, spec: DecoderSpec, products: Products, arena: Arena, capability: int) -> None:
        chunk = products.chunk
        self._tile, self._capability = grouped_tile(capability), capability
        self._routing = RoutingSpace(spec.specs(MoeSpec), arena, chunk)
        self._products, self._width = products, spec.hidden_size
        needed = chunk if self._routing.experts_per_token else 0
        self._assignments = arena.take((4, chunk * self._routing.experts_per_token), torch.int32)
        self._counts = arena.take((2 * self._routing.count,), torch.int32)
        pinned = self._counts.is_cuda
        self._host_counts = torch.zeros(2 * self._routing.count, dtype=torch.int32, pin_memory=pinned)
        self._counted = torch.cuda.Event() if pinned else None
        self.floats = arena.take((needed, self._width), torch.float32)
        """What the router reads; free after `read`."""
        self._sum = arena.take((needed, self._width), torch.float32)
        self._scales = arena.take((products.expert_rows,), torch.float32)
        latent = max((each.latent_size for each in spec.specs(MoeSpec)), default=0)
        self._latent = arena.take((chunk * latent,), torch.float16)
        self._latent_sum = arena.take((chunk * latent,), torch.float32)
        self._latent_scales = arena.take((chunk if latent else 0,), torch.float32)
        dense = chunk * any(each.dense_norm for each in spec.specs(MoeSpec))
        self._dense = arena.take((dense * self._width,), torch.float16)
        self._dense_scales = arena.take((dense,), torch.float32)

    def score(self, w: DeviceExperts, rows: Tensor) -> None:
        """Compute the router's scores of these rows."""
        scores = self._routing.scores[: len(rows), : w.count]
        torch.mm(rows, w.router_rows.t(), out=scores)
        if w.router_bias is not None:
            scores += w.router_bias[: w.count]
        for lora in adapted(self._products.lora, (w.router,)):
            lora.add_floats(rows, scores)

    def fits_device(self, w: DeviceExperts, assignments: int) -> bool:
        """Whether all experts are on the device, and their results fit the buffers."""
        return w.here == w.count and not w.has_expert_cache and assignments <= self._products.expert_rows

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
        floats = self.floats[:tokens]
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
        if w.shared is not None and spec.dense_norm is None:
            y, scales = self._products.dense(spec.activation_of_shared, w.shared, h)
            if w.shared_router_rows is not None:
                scales = scales * torch.sigmoid(floats @ w.shared_router_rows[0])
            torch.mul(y, scales[:, None], out=total)
        if (w.here or sent) and w.latent_down is not None and w.latent_up is not None:
            latent, latent_sum = self._project(w.latent_down, h)
            self._add_selected(spec, w, assignments, latent, sent, latent_sum.zero_())
            scale_rows(latent_sum, latent.rows, latent.scales)
            total.addcmul_(self._products.product(latent.rows, w.latent_up), latent.scales[:, None])
        elif w.here or sent:
            self._add_selected(spec, w, assignments, h, sent, total)
        return total

    def add_dense(self, spec: MoeSpec, w: DeviceExperts, x: Tensor, total: Tensor) -> None:
        """total = norm(total) + norm(dense feed-forward of norm(x)), each with weights."""
        assert spec.dense_norm is not None
        assert w.shared is not None
        (tokens, width), epsilon = x.shape, spec.dense_norm.epsilon
        h = ScaledRows(self._dense[: tokens * width].view(tokens, width), self._dense_scales[:tokens])
        norm_rows(x, spec.dense_norm, w.shared_input_norm, None, h.rows, h.scales)
        y, scales = self._products.dense(spec.activation_of_shared, w.shared, h)
        add_normed_kernel[(tokens,)](
            total, total.stride(0), y, y.stride(0), scales, NormArgs(w.expert_norm, None, epsilon),
            NormArgs(w.shared_norm, None, epsilon), WIDTH=width, BLOCK=next_power_of_two(width), SCALED=True,
            DEPENDENT=False, num_warps=warps_for(width),
        )  # fmt: skip

    def _project(self, matrix: DeviceMatrix, h: ScaledRows) -> tuple[ScaledRows, Tensor]:
        """The latent projection of the rows, which the experts read, and a buffer for their sum."""
        shape = len(h.rows), matrix.shapes.rows
        elements = torch.Size(shape).numel()
        floats = self._latent_sum[:elements].view(shape)
        latent = ScaledRows(self._latent[:elements].view(shape), self._latent_scales[: shape[0]])
        torch.mul(self._products.product(h.rows, matrix), h.scales[:, None], out=floats)
        scale_rows(floats, latent.rows, latent.scales)
        return latent, floats

    def _choose(self, spec: MoeSpec, w: DeviceExperts, tokens: int) -> None:
        space = self._routing
        select_experts_kernel[(tokens,)](
            space.scores, space.scores.stride(0), space.ids, space.weights,
            space.scores if w.selection_bias is None else w.selection_bias,
            space.scores if w.expert_scales is None else w.expert_scales, spec.scale,
            COUNT=spec.experts, EXPERTS_PER_TOKEN=spec.experts_per_token, GATING=GATINGS[spec.gating],
            NORMALIZED=spec.normalized, BIASED=w.selection_bias is not None,
            SCALED=w.expert_scales is not None,
            GROUPS=spec.groups, GROUPS_PER_TOKEN=spec.groups_per_token,
            DEPENDENT=False, num_warps=1,
        )  # fmt: skip

    def _group(self, spec: MoeSpec, w: DeviceExperts, ids: Tensor, weights: Tensor) -> ExpertRows:
        """Sort the assignments by slot; if the host needs the counts per slot, start their copy."""
        count = len(ids)
        slots, positions, tokens, row_slots = (each[:count] for each in self._assignments)
        if w.has_expert_cache:
            self._counts.zero_()  # Slots without an expert are not written by the kernel.
        group_assignments_kernel[(w.count,)](
            ids, w.slots, slots, positions, tokens, row_slots, self._counts, count, w.here,
            EXPERTS=w.count, EXPERTS_PER_TOKEN=spec.experts_per_token, STEP=ASSIGNMENTS_PER_STEP, num_warps=4,
        )  # fmt: skip
        if not self.fits_device(w, count):
            self._host_counts.copy_(self._counts, non_blocking=True)
            if self._counted is not None:
                self._counted.record()
        if not spec.weighted_input:
            return ExpertRows(slots, weights, positions, tokens, row_slots)
        row_weights = torch.empty_like(weights).scatter_(0, positions.long(), weights)
        return ExpertRows(slots, torch.ones_like(weights), positions, tokens, row_slots, row_weights)

    def _add_selected(
        self,
        spec: MoeSpec,
        w: DeviceExperts,
        assignments: ExpertRows,
        h: ScaledRows,
        sent: ExpertStacks | None,
        total: Tensor,
    ) -> None:
        count = len(assignments.slots)
        tile = expert_tile(self._capability, count, w.count)
        if self.fits_device(w, count):
            tiles = sorted_tiles(self._counts[: w.count], count, tile.rows)
            self._add_rows(spec, _TiledRows(w.stacks, 0, 0, count, tiles, tile), assignments, h, total)
            return
        counts = self._counts_on_host()[: w.all_slots]
        batches = list(self._batches(counts, w.stacks, 0)) if w.here else []
        if sent is not None:
            batches += self._batches(counts, sent, w.here)
        rows_of = (self._tile.rows if _is_streamed(batch.stacks) else tile.rows for batch in batches)
        tiles_of = [batch.tiles(rows) for batch, rows in zip(batches, rows_of, strict=True)]
        # One transfer to the device for all tiles of the layer.
        numbers = list(chain.from_iterable(chain.from_iterable(tiles_of)))
        table = torch.tensor(numbers, dtype=torch.int32).to(h.rows.device, non_blocking=True).view(-1, 3)
        for batch, tiles in zip(batches, table.split(list(map(len, tiles_of))), strict=True):
            experts = batch.experts if _is_streamed(batch.stacks) else ()
            part = _TiledRows(batch.stacks, batch.first_slot, batch.first, batch.rows, tiles, tile, experts)
            self._add_rows(spec, part, assignments, h, total)

    def _counts_on_host(self) -> list[int]:
        """The assignments per slot; waits for the copy that `_group` started."""
        if self._counted is not None:
            self._counted.synchronize()
        counts: list[int] = self._host_counts.tolist()
        return counts

    def _batches(self, counts: Sequence[int], stacks: ExpertStacks, first_slot: int) -> Iterator[_Batch]:
        """Batches of experts with tokens, as large as the buffers allow; `counts`: assignments per slot."""
        streamed = [matrix for matrix in stacks.matrices if isinstance(matrix, StreamedMatrix)]
        max_experts = min((self._experts_at_once(matrix) for matrix in streamed), default=stacks.count)
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

    def _experts_at_once(self, matrix: StreamedMatrix) -> int:
        """How many experts' rows fit the scratch and a transfer piece; at least 1."""
        fitting = len(self._products.scratch) // (matrix.shapes.rows * matrix.shapes.columns)
        return max(min(fitting, self._sender.piece_bytes // matrix.expert_bytes), 1)

    def _add_rows(
        self, spec: MoeSpec, part: _TiledRows, assignments: ExpertRows, h: ScaledRows, total: Tensor
    ) -> None:
        stacks, first, count, products = part.stacks, part.first, part.rows, self._products
        hidden = _expert_rows(stacks, stacks.up)
        index = assignments.tokens[first : first + count]
        scales = torch.index_select(h.scales, 0, index, out=self._scales[:count])
        if assignments.row_weights is not None:
            scales *= assignments.row_weights[first : first + count]
        both = products.floats(2, count, hidden)
        biases = stacks.up_bias, stacks.gate_bias
        for matrix, bias, out in zip((stacks.up, stacks.gate), biases, both, strict=True):
            if matrix is None:
                continue
            self._multiply(part, matrix, h.rows, index, out)
            if bias is not None:
                of_row = assignments.row_slots[first : first + count] - part.first_slot
                out += bias.view(-1, hidden)[of_row] / scales[:, None]
        inner = products.hidden(count, hidden)
        gate = None if stacks.gate is None else both[1]
        activation_rows(gate, both[0], None, None, scales, spec.activation, inner.rows, inner.scales)
        y = products.floats(count, total.shape[1])
        self._multiply(part, stacks.down, inner.rows, None, y)
        add_experts(y, inner.scales, stacks.down_bias, assignments, total, first, count, part.first_slot)

    def _multiply(
        self, part: _TiledRows, matrix: DeviceMatrix, rows: Tensor, index: Tensor | None, out: Tensor
    ) -> None:
        """out (rows of the part, rows of an expert) float32 = rows[index] · the expert's transposed."""
        expert_rows = _expert_rows(part.stacks, matrix)
        if not isinstance(matrix, StreamedMatrix):
            expert_product(rows, index, matrix, expert_rows, part.tiles, part.tile, out)
            for lora in adapted(self._products.lora, (matrix,)):
                tile = self._tile._replace(rows=part.tile.rows)
                lora.add_experts(rows, index, part.tiles, tile, out)
            return
        columns = matrix.shapes.columns
        piece_rows = self._sender.piece_bytes // matrix.group_bytes * ROWS_PER_GROUP
        step = min(expert_rows, self._products.rows_at_once(columns), piece_rows)
        if matrix.order_in_memory == "columns":
            step = expert_rows
        for first in range(0, expert_rows, step):
            count = min(step, expert_rows - first)
            weights = self._products.scratch[: len(part.experts) * count * columns]
            self._send(matrix, part.experts, first, weights.view(-1, columns))
            grouped_product(rows, index, weights.view(-1, count, columns), part.tiles, out, first, self._tile)

    def _send(self, matrix: StreamedMatrix, experts: Sequence[int], first: int, weights: Tensor) -> None:
        """Stream the experts' rows from `first` on as float16, (experts · rows, columns); adjacent ones in
        one copy. Of those stored by columns all are streamed.
        """
        rows = len(weights) // len(experts)
        begin, nbytes = (n * matrix.group_bytes // ROWS_PER_GROUP for n in (first, rows))
        if matrix.order_in_memory == "columns":
            nbytes = matrix.expert_bytes
        spans: list[tuple[int, int]] = []
        for expert in experts:
            at = expert * matrix.expert_bytes + begin
            if spans and spans[-1][1] == at:
                spans[-1] = spans[-1][0], at + nbytes
            else:
                spans.append((at, at + nbytes))
        raw = self._sender.send(matrix.memory, spans)
        if matrix.order_in_memory == "rows":
            unpack_neuron_rows(raw, matrix.format, weights)
        elif matrix.order_in_memory == "columns":
            layout = ColumnLayout.of(matrix.source)
            unpack_neuron_columns(raw, matrix.format, layout, weights, by_expert=True)
        else:
            unpack(raw, matrix.format, matrix.shapes.columns, weights)
        if matrix.source.scales is not None:
            for index, expert in enumerate(experts):
                weights[index * rows : (index + 1) * rows].mul_(float(matrix.source.scales[expert]))
        self._sender.done()


def _is_streamed(stacks: ExpertStacks) -> bool:
    return isinstance(stacks.up, StreamedMatrix)


def _expert_rows(stacks: ExpertStacks, matrix: DeviceMatrix) -> int:
    """Rows of one expert's matrix."""
    return matrix.shapes.rows // (1 if isinstance(matrix, StreamedMatrix) else stacks.count)
