"""A decoder's weights, caches and buffers in device memory."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.caches.cache_types import CacheType, has_recent
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.cache.recent_positions import DeviceRecentPages
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.draft.target import HeadTarget, first_rows
from edgeinfer_kernels.cuda.lora import DeviceLora, EmbeddingLora, PlacedMatrix
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock, DeviceCache
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, OrderedRows, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix, has_non_finite
from edgeinfer_kernels.cuda.weights.per_layer_rows import PerLayerEmbeddings
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    ResidualBlock,
    ResidualWeights,
    blocks_of,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_matrices import cache_positions
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER
from edgeinfer_kernels.stages import CPU, GPU, Shard, Stage, part_of_decoder, shards_on
from edgeinfer_kernels.tensor_parts import TensorPart
from edgeinfer_quant_formats.formats import non_finite_error

OnLoaded = Callable[[Matrix], None]


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


class DeviceModel(DeviceBuilder):
    """All device data of a decoder; in a counting arena only its size is counted.

    `spec` and `weights` are those of the whole decoder; `stages`: of a split model, whose shards on the GPU
    are taken. It starts with hidden states from its host, and has no embedding. The feed-forwards of the
    layers `gathered` store down by neuron. `target`: of a draft head. `part`: of a rank of tensor parallel;
    `spec` and `weights` are then those of `tensor_part`.

    Raises:
        UnsupportedOnDeviceError: a matrix or a block without a kernel.
        ValueError: a feed-forward with a norm would be split.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        arena: Arena,
        context: int,
        *,
        kv: CacheType = "f16",
        stages: Sequence[Stage] = (),
        per_layer_here: bool = False,
        gathered: Collection[int] = (),
        sequences: int = 1,
        target: HeadTarget | None = None,
        part: TensorPart | None = None,
    ) -> None:
        super().__init__(arena, cache_positions(context), {})
        self.sequences = sequences
        self.part = part
        self.vocabulary = part.whole_vocabulary if part else spec.vocabulary_size
        """Rows of logits; `spec` has those of the head that are here."""
        self._target = target
        self._non_finite: list[tuple[str, Tensor]] = []
        """Names, and flags whether some of their rows have scales that are NaN or infinite."""
        here, there = shards_on(GPU, stages), shards_on(CPU, stages)
        self._shards = [[of[layer] for of in (here, there) if layer in of] for layer in here]
        self.layers = tuple(here) if stages else tuple(range(len(spec.layers)))
        """The layers of the whole decoder that are on the device."""
        layer_count = len(spec.layers)
        self.shards: list[tuple[Any, Any, Shard]] = []
        """Blocks of a split model: their weights in the whole model and here, and the shard of the layer."""
        if stages:
            whole = weights
            spec, weights = part_of_decoder(spec, weights, here)
            self.shards = [
                (before.block, own.block, shard)
                for (layer, shard), part in zip(here.items(), weights.layers, strict=True)
                for before, own in zip(whole.layers[layer].blocks, part.blocks, strict=True)
            ]
        if part is not None:
            self._shards = [part.shards(spec, layer) for layer in self.layers]
        self.spec = spec
        self.layer_count = layer_count
        """Layers of the whole decoder."""
        self.context = context
        self._kv = kv
        self._fills: list[_Fill] = []
        self._gathered, self._by_neuron = gathered, False
        self._columns: list[tuple[ColumnMatrix, Matrix]] = []
        self.lora: dict[int, DeviceLora] = {}
        """The LoRA adapters in use, by the id of the `DeviceMatrix`."""
        self.placed: dict[int, list[PlacedMatrix]] = {}
        """The matrices of the file in each `DeviceMatrix`, by its id; `matrices`: the latter."""
        self.matrices: dict[int, DeviceMatrix] = {}
        self.embedding_lora: EmbeddingLora | None = None
        """The adapter of the embedding, in use."""
        self._decoded: list[tuple[Tensor, Matrix]] = []
        self.parts: list[Part] = []
        self._states: dict[BlockIndex, Any] = {}
        pages = self.positions // PAGE if has_recent(kv) else 0
        self._recent_slots = arena.take((pages,), torch.int32)
        self.blocks = [self._block(index, residual, w) for index, residual, w in blocks_of(spec, weights)]
        caches = [state for state in self._states.values() if isinstance(state, DeviceCache)]
        self.recent = DeviceRecentPages(caches, self._recent_slots) if pages else None
        """The recent positions of the caches in f16; None: they have none."""
        before = arena.used
        self.norm = self.vector(weights.output_norm)
        self.norm_bias = self.vector(weights.output_norm_bias)
        self.position_rows = self.vector(weights.all_position_rows)
        """The learned rows of positions, one after another."""
        shared = None if target is None else target.output
        self.head = self.matrix(weights.output) if shared is None else first_rows(shared, weights.output.rows)
        self.head_bias = self.vector(weights.output_bias)
        ids = weights.output_ids
        self.output_ids = None if ids is None else self.integers(ids.astype(np.int32))
        """The token ids of the rows of `head`; None: they are 0…"""
        self.parts.append(Part("head", arena.used - before, read=True))
        before = arena.used
        self.per_layer = PerLayerEmbeddings.take(weights.per_layer_token_embd, arena, per_layer_here)
        if per_layer_here:
            self.parts.append(Part(PER_LAYER, arena.used - before, read=False))
        self.embedding = self.head
        if target is not None and target.embedding is not None:
            self.embedding = target.embedding
        elif not stages and weights.token_embd is not weights.output:
            before = arena.used
            self.embedding = self.matrix(weights.token_embd)
            self.parts.append(Part("embedding", arena.used - before, read=False))

    def caches_of(self, sources: Mapping[BlockIndex, BlockIndex]) -> dict[BlockIndex, DeviceCache]:
        """The caches of some blocks of the whole decoder, which are on the device."""
        found = {(self.layers[block.index.layer], block.index.position): block.state for block in self.blocks}
        return {own: found[source.layer, source.position] for own, source in sources.items()}

    @property
    def states_of_target(self) -> Tensor:
        """The hidden states that the target of a draft head keeps."""
        assert self._target is not None, "only a draft head has a target"
        return self._target.states

    def _block(self, index: BlockIndex, residual: ResidualBlock[Any], w: ResidualWeights[Any]) -> DeviceBlock:
        arena, spec, module = self._arena, residual.block, device_module(residual.block.kind)
        begin = arena.used
        norms = self.norms(w)
        self._by_neuron = self.layers[index.layer] in self._gathered
        weights = module.take(self, spec, w.block, self._shards[index.layer] if self._shards else ())
        name = f"layer {index.layer} {module.PART}"
        self.parts.append(Part(name, arena.used - begin, read=True))
        begin = arena.used
        several: dict[str, Any] = {"sequences": self.sequences} if spec.recurrent else {}
        if has_recent(self._kv) and getattr(module, "HAS_PAGES", False):
            several = {"slots": self._recent_slots}
        state = module.take_state(arena, spec, self.positions, self._kv, **several)
        self._states[index] = state
        if self._target is not None and index in self._target.caches:
            state = self._target.caches[index]
        elif spec.source_layer is not None:
            state = self._states[self.spec.state_source(index)]
        elif state is not None:
            self.parts.append(Part(f"layer {index.layer} keys and values", arena.used - begin, read=True))
        self._add_inactive_part(index, module, weights)
        has_granules = not spec.is_divisible or module.has_granules(weights)
        return DeviceBlock(index, residual, weights, norms, state, has_granules)

    def _add_inactive_part(self, index: BlockIndex, module: Any, weights: Any) -> None:
        """Record the bytes that not every token reads, separately from the rest of the block."""
        inactive = module.inactive_bytes(weights)
        if inactive:
            whole = self.parts[-1]
            self.parts[-1] = Part(whole.name, whole.nbytes - inactive, read=True)
            self.parts.append(Part(f"layer {index.layer} inactive experts", inactive, read=False))

    def matrix(self, source: Matrix) -> DeviceMatrix:
        rows = source.experts * source.rows
        target = self._arena.matrix(source.name, source.format, rows, source.columns)
        parts = [source.expert(i) for i in range(source.experts)] if source.picked else [source]
        self._fills += [_Fill(part, target, index * source.rows, None) for index, part in enumerate(parts)]
        self._place(target, PlacedMatrix(id(source), 0, source.rows, None))
        return target

    def down(self, source: Matrix) -> DeviceMatrix:
        if not self._by_neuron or not source.columns:
            return self.matrix(source)
        target = ColumnMatrix.take(self._arena, source)
        self._columns.append((target, source))
        return target

    def _place(self, target: DeviceMatrix, placed: PlacedMatrix) -> None:
        self.matrices[id(target)] = target
        self.placed.setdefault(id(target), []).append(placed)

    def stack(self, matrices: Sequence[OrderedRows]) -> Stack:
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
            self._place(target, PlacedMatrix(id(matrix), row, matrix.rows, order))
            row += matrix.rows
        return target

    def floats(self, matrix: Matrix) -> Tensor:
        """The matrix in float32, (rows, columns)."""
        tensor = self._arena.take((matrix.rows, matrix.columns), torch.float32)
        self._decoded.append((tensor, matrix))
        return tensor

    def fill(self, uploader: Uploader, on_loaded: OnLoaded | None = None) -> None:
        """Upload all weights from the file; `on_loaded` is called with every uploaded matrix.

        Raises `FormatError`: a scale is NaN or infinite.
        """
        self.fill_vectors()
        for tensor, matrix in self._decoded:
            tensor.copy_(torch.from_numpy(matrix.decoded()))
        for entry in self._fills:
            if entry.source.nbytes:  # In a split layer, the device may have no rows of a matrix.
                self._fill(entry, uploader)
            if on_loaded:
                on_loaded(entry.source)
        for columns, source in self._columns:
            raw = torch.from_numpy(np.array(source.raw))
            flag = has_non_finite(raw, source.format).to(uploader.device)
            self._non_finite.append((source.name, flag))
            columns.upload(source)
            if on_loaded:
                on_loaded(source)
        self.per_layer.fill(uploader)
        self._refuse_non_finite()
        self._decoded.clear()
        self._fills.clear()
        self._columns.clear()

    def _refuse_non_finite(self) -> None:
        """Check all flags of the packing once, because each check waits for the device."""
        if not self._non_finite:
            return
        names, flags = zip(*self._non_finite, strict=True)
        broken = torch.stack(flags).cpu().numpy()
        self._non_finite.clear()
        if broken.any():
            raise non_finite_error(names[int(broken.argmax())], "its scales")

    def _fill(self, entry: _Fill, uploader: Uploader) -> None:
        size = 2 if entry.order is None else len(entry.order)
        if size % 2:  # Rows are paired: two heads at a time.
            size *= 2
        factors = entry.source.row_scales
        for first, raw in uploader.chunks(entry.source.raw, size):
            own = None if factors is None else torch.from_numpy(factors[first : first + len(raw)])
            if entry.order is not None:
                heads = raw.view(-1, len(entry.order), raw.shape[1])
                raw = heads[:, torch.from_numpy(entry.order).to(raw.device)].view(raw.shape)
            entry.target.fill(entry.first_row + first, raw, own)
            self._non_finite.append((entry.source.name, has_non_finite(raw, entry.source.format)))
