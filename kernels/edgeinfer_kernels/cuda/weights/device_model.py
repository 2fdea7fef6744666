"""A decoder's weights, caches and buffers in device memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts, DeviceFeedForward, check_expert_rows
from edgeinfer_kernels.cuda.weights.device_layers import (
    DeviceAttention,
    DeviceCache,
    LayerBuilder,
    OrderedRows,
    Stack,
)
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix, has_non_finite
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.layer_split import LayerSplit
from edgeinfer_kernels.sizes.cuda_matrices import cache_positions, padded_rows
from edgeinfer_kernels.specification import (
    DecoderSpecification,
    ExpertsSpecification,
    FeedForwardSpecification,
)
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, LayerWeights, Matrix
from edgeinfer_quant_formats.scale_fields import non_finite_error

OnPlaced = Callable[[Matrix], None]


@dataclass(frozen=True)
class DeviceLayer:
    attention: DeviceAttention
    feed_forward: DeviceFeedForward | DeviceExperts
    cache: DeviceCache


LAYER_PARTS = ("attention", "feed-forward", "keys and values")


@dataclass(frozen=True)
class Part:
    """A part of the device memory; `read`: every token reads it."""

    name: str
    nbytes: int
    read: bool


@dataclass(frozen=True)
class _Fill:
    """A matrix of the file and its destination; `order`: its rows within each group of that many."""

    source: Matrix
    target: DeviceMatrix
    first_row: int
    order: npt.NDArray[np.int64] | None


class DeviceModel(LayerBuilder):
    """All device data of a decoder; in a counting arena only its size is counted.

    `divisions`: of a split model, whose layers and weights are those of `layer_split.device_half`. It starts
    with hidden states from its host, and has no embedding.

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
        kv: CacheType = "f16",
        divisions: Sequence[LayerSplit] = (),
    ) -> None:
        super().__init__(arena, cache_positions(context), {})
        self._non_finite: list[tuple[str, Tensor]] = []
        """Names, and flags whether some of their rows have scales that are NaN or infinite."""
        self._divisions = [division for division in divisions if division.attention]
        embeds = not divisions
        self.specification = specification
        self.embeds = embeds
        self.context = context
        self._kv = kv
        self._fills: list[_Fill] = []
        self._decoded: list[tuple[Tensor, Matrix]] = []
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
        marks = [arena.used]
        attention = self._attention(weights, facts.attention)
        marks.append(arena.used)
        second = weights.feed_forward
        feed_forward = (
            self._experts(index, second, facts.feed_forward)
            if isinstance(second, ExpertWeights)
            else self._feed_forward(second)
        )
        marks.append(arena.used)
        cache = DeviceCache.take(arena, facts.attention, self.positions, self._kv)
        marks.append(arena.used)
        for what, begin, end in zip(LAYER_PARTS, marks, marks[1:], strict=False):
            self.parts.append(Part(f"layer {index} {what}", end - begin, read=True))
        if isinstance(feed_forward, DeviceExperts):
            self._part_experts(index, feed_forward)
        return DeviceLayer(attention, feed_forward, cache)

    def _experts_of(self, index: int, w: ExpertWeights) -> Sequence[int]:
        """The expert numbers of the matrices in `w`."""
        return self._divisions[index].experts if self._divisions else range(w.ffn_up_exps.experts)

    def _matrix(self, source: Matrix) -> DeviceMatrix:
        rows = source.experts * source.rows
        target = self._arena.matrix(source.name, source.format, rows, source.columns)
        parts = [source.expert(i) for i in range(source.experts)] if source.picked else [source]
        self._fills += [_Fill(part, target, place * source.rows, None) for place, part in enumerate(parts)]
        return target

    def _stack(self, matrices: Sequence[OrderedRows]) -> Stack:
        """Adjacent matrices of one format share planes."""
        runs: list[list[OrderedRows]] = []
        for entry in matrices:
            if runs and runs[-1][-1][0].format == entry[0].format:
                runs[-1].append(entry)
            else:
                runs.append([entry])
        return Stack(tuple(self._run(run) for run in runs))

    def _run(self, run: Sequence[OrderedRows]) -> DeviceMatrix:
        top = run[0][0]
        target = self._arena.matrix(top.name, top.format, sum(m.rows for m, _ in run), top.columns)
        row = 0
        for matrix, order in run:
            self._fills.append(_Fill(matrix, target, row, order))
            row += matrix.rows
        return target

    def _part_experts(self, index: int, w: DeviceExperts) -> None:
        """Record the experts' bytes that not every token reads, separately from the rest of the layer."""
        facts = self.specification.layers[index].feed_forward
        assert isinstance(facts, ExpertsSpecification)
        stacks = sum(4 * part.numel() for stack in (w.gate, w.up, w.down) for part in stack.parts)
        resting = stacks - stacks * facts.used // facts.count
        place = len(self.parts) - len(LAYER_PARTS) + 1
        whole = self.parts[place]
        self.parts[place] = Part(whole.name, whole.nbytes - resting, read=True)
        self.parts.append(Part(f"layer {index} resting experts", resting, read=False))

    def _places(self, count: int, experts: Sequence[int], changing: bool) -> Tensor:
        """(2, count) int32: slot of each expert on the device, and on the host."""
        places = np.full((2, count), -1, np.int32)
        places[0, list(experts)] = np.arange(len(experts))
        others = np.flatnonzero(places[0] < 0)
        places[1, others] = others if changing else np.arange(len(others))
        tensor = self._arena.take(places.shape, torch.int32)
        self._vectors.append((tensor, places))
        return tensor

    def _experts(
        self, index: int, w: ExpertWeights, facts: FeedForwardSpecification | ExpertsSpecification
    ) -> DeviceExperts:
        check_expert_rows(w)
        changing = bool(self._divisions) and self._divisions[index].changing
        shared_router = None
        if w.ffn_gate_inp_shexp is not None:
            row = np.ascontiguousarray(w.ffn_gate_inp_shexp, np.float32)
            raw = row.view(np.uint8)[None]
            shared_router = Matrix("ffn_gate_inp_shexp", "F32", 1, len(row), raw)
        assert isinstance(facts, ExpertsSpecification)
        return DeviceExperts(
            count=facts.count,
            here=w.ffn_up_exps.experts,
            places=self._places(facts.count, self._experts_of(index, w), changing),
            hidden=w.ffn_up_exps.rows,
            router=self._matrix(w.ffn_gate_inp),
            router_rows=self._rows(w.ffn_gate_inp),
            router_bias=self._vector(w.ffn_gate_inp_bias, padded_rows(w.ffn_gate_inp.rows)),
            gate=self._matrix(w.ffn_gate_exps),
            up=self._matrix(w.ffn_up_exps),
            down=self._matrix(w.ffn_down_exps),
            gate_bias=self._vector(w.ffn_gate_exps_bias),
            up_bias=self._vector(w.ffn_up_exps_bias),
            down_bias=self._vector(w.ffn_down_exps_bias),
            norm=self._vector(w.ffn_norm),
            shared=None if w.shared is None else self._feed_forward(w.shared),
            shared_router=None if shared_router is None else self._matrix(shared_router),
            shared_router_rows=None if shared_router is None else self._rows(shared_router),
            changing=changing,
        )

    def _rows(self, matrix: Matrix) -> Tensor:
        """The matrix in float32, (rows, columns)."""
        tensor = self._arena.take((matrix.rows, matrix.columns), torch.float32)
        self._decoded.append((tensor, matrix))
        return tensor

    def fill(self, uploader: Uploader, on_placed: OnPlaced | None = None) -> None:
        """Upload all weights from the file; `on_placed` is called with every uploaded matrix.

        Raises `FormatError`: a scale is NaN or infinite.
        """
        self.fill_vectors()
        for tensor, matrix in self._decoded:
            tensor.copy_(torch.from_numpy(matrix.decoded()))
        for entry in self._fills:
            if entry.source.nbytes:  # In a split layer, the device may have no rows of a matrix.
                self._fill(entry, uploader)
            if on_placed:
                on_placed(entry.source)
        self._refuse_non_finite()
        self._decoded.clear()
        self._fills.clear()

    def _refuse_non_finite(self) -> None:
        """Check all flags of the packing once, because each check waits for the device."""
        if not self._non_finite:
            return
        names, flags = zip(*self._non_finite, strict=True)
        found = torch.stack(flags).cpu().numpy()
        self._non_finite.clear()
        if found.any():
            raise non_finite_error(names[int(found.argmax())], "its scales")

    def _fill(self, entry: _Fill, uploader: Uploader) -> None:
        size = 2 if entry.order is None else len(entry.order)
        if size % 2:  # Rows are paired: two heads at a time.
            size *= 2
        for first, raw in uploader.chunks(entry.source.raw, size):
            if entry.order is not None:
                heads = raw.view(-1, len(entry.order), raw.shape[1])
                raw = heads[:, torch.from_numpy(entry.order).to(raw.device)].view(raw.shape)
            entry.target.fill(entry.first_row + first, raw)
            self._non_finite.append((entry.source.name, has_non_finite(raw, entry.source.format)))
