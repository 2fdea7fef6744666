"""Feed-forwards and experts that read only active neurons: supported layers, structures and memory."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from edgeinfer_kernels.blocks.feed_forward import RELU_ACTIVATIONS, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles, BundleWindows, Window
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    NEURON_FORMATS,
    ColumnLayout,
    MemoryOrder,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
    row_groups,
)
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, interleaved_bytes, padded_vector
from edgeinfer_kernels.cpu.runtime.abi import (
    CACHE_LINE,
    MAX_NEURONS_PER_PIECE,
    NEURONS_PER_BLOCK,
    SPARSE_SCRATCH,
    SPARSE_TOKENS,
    SUMS_SCRATCH,
    lane_activations_bytes,
    quantized_bytes,
)
from edgeinfer_kernels.cpu.runtime.block_args import NeuronRowsArgs, SparseArgs
from edgeinfer_kernels.cpu.sparse_experts import (
    build_sparse_experts,
    columns_args,
    expert_stacks_by_neuron,
    why_experts_are_dense,
)
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.matrix import Matrix, MemoryKey
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_kernels.pages import Bytes, allocate

PIECES_PER_THREAD = 8
SparseLayers = Mapping[int, NeuronPredictor | None]
"""The sparse layers, each with its predictor or None; experts have none."""
SparseWeights = FeedForwardWeights | MoeWeights


def why_dense(spec: DecoderSpec, weights: DecoderWeights, layer: int) -> str | None:
    """The reason why a layer cannot be sparse; None: it can."""
    index = sparse_index(spec, layer)
    if index is None:
        return "it has no feed-forward"
    block, w = spec.residual(index).block, weights.residual(index).block
    return why_experts_are_dense(block, w) if isinstance(block, MoeSpec) else _why_dense(block, w)


def _why_dense(spec: FeedForwardSpec, weights: FeedForwardWeights) -> str | None:
    if spec.activation not in RELU_ACTIVATIONS:
        return f"its activation is {spec.activation}, which is never exactly zero"
    scale, bias = weights.gate_scale, weights.ffn_gate_bias
    if weights.ffn_gate is None:
        scale, bias = weights.up_scale, weights.ffn_up_bias
    if scale <= 0 or (scale != 1 and bias is not None):
        return f"its projection has the scale {scale}, with which its sign doesn't show what is active"
    for matrix in (weights.ffn_gate, weights.ffn_up, weights.ffn_down):
        if matrix is not None and matrix.format not in NEURON_FORMATS:
            return f"{matrix.name} is {matrix.format}; sparse are {', '.join(NEURON_FORMATS)}"
    if weights.ffn_up.columns % NEURONS_PER_BLOCK or weights.ffn_up.rows % NEURONS_PER_BLOCK:
        return f"{weights.ffn_up.name} isn't a multiple of {NEURONS_PER_BLOCK} in both its sizes"
    return None


def why_unbundled(spec: DecoderSpec, weights: DecoderWeights, layer: int) -> str | None:
    """The reason why a layer's neurons cannot be read from bundles; None: they can."""
    reason, index = why_dense(spec, weights, layer), sparse_index(spec, layer)
    if reason is not None or index is None:
        return reason
    block = spec.residual(index).block
    if isinstance(block, MoeSpec):
        return "its neurons are those of experts"
    return "a norm of its neurons needs all of them at once" if block.sub_norm is not None else None


def rows_by_neuron(weights: FeedForwardWeights, predictor: NeuronPredictor | None) -> list[Matrix]:
    """The matrices that are read row by row for single neurons; the others are read completely."""
    if weights.ffn_gate is None:
        return [weights.ffn_up] if predictor else []
    return [weights.ffn_gate, weights.ffn_up] if predictor else [weights.ffn_up]


def by_neuron(weights: SparseWeights, predictor: NeuronPredictor | None) -> list[Matrix]:
    """The matrices of a sparse layer that steps with many tokens read from the file."""
    if isinstance(weights, MoeWeights):
        return expert_stacks_by_neuron(weights)
    return [*rows_by_neuron(weights, predictor), weights.ffn_down]


def sparse_index(spec: DecoderSpec, layer: int) -> BlockIndex | None:
    """The block of a layer that may be sparse: its dense feed-forward, or its experts; None: it has none."""
    for kind in (FeedForwardSpec, MoeSpec):
        for position, residual in enumerate(spec.layers[layer].blocks):
            if isinstance(residual.block, kind):
                return BlockIndex(layer, position)
    return None


def sparse_block(weights: DecoderWeights, layer: int) -> SparseWeights:
    """The weights of the block that may be sparse. Raises TypeError: the layer has none."""
    blocks = [residual.block for residual in weights.layers[layer].blocks]
    for kind in (FeedForwardWeights, MoeWeights):
        for block in blocks:
            if isinstance(block, kind):
                return block
    raise TypeError(f"layer {layer} has no feed-forward")


def experts_of(weights: DecoderWeights, layer: int) -> int:
    """The experts of the block that may be sparse; 0: it is a dense feed-forward."""
    block = sparse_block(weights, layer)
    return block.ffn_up_exps.experts if isinstance(block, MoeWeights) else 0


def sparse_unit(weights: DecoderWeights, layer: int) -> FeedForwardWeights:
    """The feed-forward that may be sparse, or the first expert, which has the size of the others."""
    block = sparse_block(weights, layer)
    return block.expert(0) if isinstance(block, MoeWeights) else block


def dense_layer(weights: DecoderWeights, layer: int) -> FeedForwardWeights:
    """The dense feed-forward of a layer. Raises TypeError: it has none."""
    block = sparse_block(weights, layer)
    if isinstance(block, MoeWeights):
        raise TypeError(f"layer {layer} has no dense feed-forward")
    return block


def matrices_by_neuron(blocks: Mapping[int, SparseWeights], layers: SparseLayers) -> list[Matrix]:
    """`by_neuron` of the blocks of all sparse layers."""
    return [matrix for layer in layers for matrix in by_neuron(blocks[layer], layers[layer])]


def predictor_matrices(layers: SparseLayers) -> list[Matrix]:
    """The matrices of all predictors that are multiplied as a whole."""
    return [predictor.second for predictor in layers.values() if predictor]


def predictor_rows(layers: SparseLayers) -> list[Matrix]:
    """The matrices of all predictors whose rows are stored one by one: each thread multiplies some."""
    return [predictor.first for predictor in layers.values() if predictor]


def predictor_bytes(predictor: NeuronPredictor) -> int:
    """Bytes of a predictor's matrices in memory; a token reads all of them."""
    first = predictor.first
    return first.rows * neuron_row_bytes(first) + interleaved_bytes(predictor.second)


def neuron_bytes(weights: FeedForwardWeights, predictor: NeuronPredictor | None) -> int:
    """Bytes of a layer's per-neuron layouts, without the predictor."""
    rows = rows_by_neuron(weights, predictor)
    return (
        sum(matrix.rows * neuron_row_bytes(matrix) for matrix in rows)
        + ColumnLayout.of(weights.ffn_down).nbytes
    )


def factor_bytes(weights: FeedForwardWeights) -> int:
    """Bytes of the factors in down's layout by neuron: a token reads those of every block with an active
    neuron, and one suffices.
    """
    layout = ColumnLayout.of(weights.ffn_down)
    return layout.nbytes - layout.blocks * NEURONS_PER_BLOCK * layout.neuron_bytes


def scattered_bytes(
    weights: FeedForwardWeights, predictor: NeuronPredictor | None, active: float, named: float
) -> float:
    """Bytes that a token reads of single neurons in a sparse layer's per-neuron layouts.

    `active`: fraction of active neurons; `named`: fraction that the predictor selects.
    """
    layout = ColumnLayout.of(weights.ffn_down)
    nbytes = active * (layout.nbytes - factor_bytes(weights))
    for matrix in rows_by_neuron(weights, predictor):
        is_named = predictor is not None and matrix is (weights.ffn_gate or weights.ffn_up)
        nbytes += (named if is_named else active) * matrix.rows * neuron_row_bytes(matrix)
    return nbytes


class SparseBlocks:
    """Builds the structures of sparse blocks, and the memory that they share.

    `blocks`: the weights of each sparse layer on the CPU. `bundles`: the file from which those of active
    neurons are read; None: all are in memory.
    """

    def __init__(
        self,
        arena: Arena,
        kernels: Kernels,
        blocks: Mapping[int, SparseWeights],
        layers: SparseLayers,
        threads: int,
        hidden_size: int,
        bundles: Bundles | None = None,
    ) -> None:
        self._arena = arena
        self.windows = BundleWindows(bundles, kernels, arena) if bundles else None
        self._kernels = kernels
        self._blocks = blocks
        self._layers = layers
        self._threads = threads
        self._sizes = _Sizes(hidden_size, blocks, layers)
        self._memory = arena.keep(allocate(self._sizes.nbytes(threads)))
        self.memories: dict[MemoryKey, tuple[Bytes, MemoryOrder]] = {}
        """The bytes of the matrices that are stored by neuron."""

    def build(self, dense: Mapping[int, int], builder: BlockBuilder) -> dict[int, int]:
        """The SparseArgs of every sparse feed-forward, of which `dense` has the FeedForwardArgs; and the
        SparseExpertsArgs of every MoE block.
        """

        def block(index: int) -> int:
            weights = self._blocks[index]
            if isinstance(weights, MoeWeights):
                return self._experts(weights)
            return self._feed_forward(index, weights, dense[index], builder)

        with ThreadPoolExecutor(max_workers=self._threads) as pool:
            return dict(zip(self._layers, pool.map(block, self._layers), strict=True))

    def _experts(self, weights: MoeWeights) -> int:
        sizes = self._sizes
        scratch = self._memory + sizes.shared, sizes.scratch, sizes.lanes
        made, memories = build_sparse_experts(self._arena, self._kernels, weights, scratch)
        stacks = {id(stack): stack for stack in weights.stacks()}
        self.memories |= {stacks[key].memory_key: memory for key, memory in memories.items()}
        return made

    def _feed_forward(
        self, index: int, weights: FeedForwardWeights, dense: int, builder: BlockBuilder
    ) -> int:
        sizes, neurons, predictor = self._sizes, weights.ffn_up.rows, self._layers[index]
        share = neurons // (self._threads * PIECES_PER_THREAD) // NEURONS_PER_BLOCK * NEURONS_PER_BLOCK
        needed, window = rows_by_neuron(weights, predictor), None
        if self.windows is None:
            rows = {id(matrix): self._rows(matrix) for matrix in needed}
            down = self._columns(weights.ffn_down)
        else:
            window = self.windows.add(index, weights, predicted=predictor is not None)
            rows = self._rows_of_window(window, needed)
            down = self._columns_of_window(window, weights.ffn_down)
        return self._arena.fill(
            SparseArgs,
            dense=dense,
            gate_rows=rows.get(id(weights.ffn_gate), 0),
            up_rows=rows.get(id(weights.ffn_up), 0),
            down=down,
            window=window.address if window else 0,
            **(self._predictor(predictor, builder) if predictor else {}),
            neurons_per_piece=min(max(NEURONS_PER_BLOCK, share), MAX_NEURONS_PER_PIECE),
            sums_offset=sizes.sums_offset,
            sums_stride=sizes.sums,
            steps_offset=sizes.steps_offset,
            scratch=self._memory + sizes.shared,
            scratch_stride=sizes.scratch,
            lanes_stride=sizes.lanes,
        )

    def _rows(self, matrix: Matrix) -> int:
        memory = lay_out_rows(matrix, self._kernels)
        self.memories[matrix.memory_key] = memory, "rows"
        return self._arena.fill(
            NeuronRowsArgs,
            kernel=self._kernels.address(f"neuron_rows_{matrix.format}"),
            weights=self._arena.keep(memory),
            groups=row_groups(matrix.columns),
            nbytes=neuron_row_bytes(matrix),
            row_bytes=neuron_row_bytes(matrix),
        )

    def _rows_of_window(self, window: Window, needed: Sequence[Matrix]) -> dict[int, int]:
        """The rows of these matrices in a window's bundles, by id."""
        return {
            id(matrix): self._arena.fill(
                NeuronRowsArgs,
                kernel=self._kernels.address(f"neuron_rows_{matrix.format}"),
                weights=window.memory + begin,
                groups=row_groups(matrix.columns),
                nbytes=neuron_row_bytes(matrix),
                row_bytes=window.slot_bytes,
                slots=window.slots,
            )
            for matrix, begin in window.layout.rows
            if any(matrix is each for each in needed)
        }

    def _columns(self, matrix: Matrix) -> int:
        memory = lay_out_columns(matrix)
        self.memories[matrix.memory_key] = memory, "columns"
        layout = ColumnLayout.of(matrix)
        made = columns_args(
            matrix.format, layout, self._kernels, self._arena.keep(memory), **self._counts_fields()
        )
        return self._arena.keep_args(made)

    def _columns_of_window(self, window: Window, matrix: Matrix) -> int:
        own = {"slots": window.slots, "bundles": window.memory, "neuron_bytes": window.slot_bytes}
        own |= self._counts_fields()
        layout = window.layout.factors
        made = columns_args(matrix.format, layout, self._kernels, window.factors, **own)
        return self._arena.keep_args(made)

    def _counts_fields(self) -> dict[str, int]:
        """Where the active neurons of each block are counted, for a NeuronColumnsArgs."""
        sizes = self._sizes
        return {"counts": self._memory + sizes.counts_offset, "counts_stride": sizes.counts}

    def _predictor(self, predictor: NeuronPredictor, builder: BlockBuilder) -> dict[str, int]:
        sizes = self._sizes
        return {
            "predictor_rows": self._rows(predictor.first),
            "predictor_second": builder.matrix(predictor.second),
            "predictor_bias": self._arena.keep(padded_vector(predictor.bias)),
            "rectified": int(predictor.rectified),
            "predicted": self._memory,
            "predicted_stride": sizes.predicted,
            "predicted_offset": sizes.predicted_offset,
            "predicted_quantized_stride": sizes.predicted_quantized,
            "rank": predictor.rank,
        }


class _Sizes:
    """Bytes of the memory that all sparse layers share, per token and per thread; the largest layer
    determines the size.
    """

    def __init__(self, hidden_size: int, blocks: Mapping[int, SparseWeights], layers: SparseLayers) -> None:
        widths = [block.ffn_up_exps.columns for block in blocks.values() if isinstance(block, MoeWeights)]
        downs = [block.ffn_down for block in blocks.values() if isinstance(block, FeedForwardWeights)]
        self.sums = max((4 * ColumnLayout.of(down).outputs for down in downs), default=0)
        rank = max((predictor.rank for predictor in layers.values() if predictor), default=0)
        self.predicted = _lines(4 * padded(rank))
        self.predicted_quantized = _lines(quantized_bytes(rank))
        self.lanes = max(map(lane_activations_bytes, (hidden_size, *widths)))
        self.sums_offset = SPARSE_SCRATCH + SPARSE_TOKENS * self.lanes
        self.predicted_offset = self.sums_offset + SPARSE_TOKENS * self.sums
        self.steps_offset = self.predicted_offset + SPARSE_TOKENS * self.predicted_quantized
        down_blocks = max((ColumnLayout.of(down).blocks for down in downs), default=0)
        self.scratch = _lines(self.steps_offset + SUMS_SCRATCH + 4 * SPARSE_TOKENS * down_blocks)
        self.counts = _lines(down_blocks)
        self.counts_offset = SPARSE_TOKENS * self.predicted
        self.shared = self.counts_offset + SPARSE_TOKENS * self.counts

    def nbytes(self, threads: int) -> int:
        return self.shared + threads * self.scratch


def _lines(nbytes: int) -> int:
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def sparse_workspace_bytes(
    hidden_size: int, weights: DecoderWeights, layers: SparseLayers
) -> tuple[int, int]:
    """Bytes of the memory that sparse layers share: once, and per thread."""
    sizes = _Sizes(hidden_size, {layer: sparse_block(weights, layer) for layer in layers}, layers)
    return sizes.shared, sizes.scratch
