"""The blocks of a decoder that run on the CPU, in the layout of the kernels."""

import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call, PackedMatrix
from edgeinfer_kernels.cpu.blocks import build_block
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles, BundleWindows
from edgeinfer_kernels.cpu.disk.file_stream import FileStream, StreamedFile
from edgeinfer_kernels.cpu.embedding import Embedding, Scratch
from edgeinfer_kernels.cpu.layout.neuron_layout import MemoryOrder
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, float_rows, interleaved_bytes
from edgeinfer_kernels.cpu.layout.repacking import OnLoaded, leave_in_file, repack
from edgeinfer_kernels.cpu.lora import LoraArena, set_lora
from edgeinfer_kernels.cpu.runtime.schedule import StepCall, StepSchedules
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import (
    SparseBlocks,
    SparseLayers,
    SparseWeights,
    dense_layer,
    matrices_by_neuron,
    predictor_matrices,
    sparse_index,
)
from edgeinfer_kernels.cpu.sparse_experts import expert_rows, with_sparse_experts
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights, ResidualWeights
from edgeinfer_kernels.decoder_state import DecoderState, StatePool
from edgeinfer_kernels.lora.weights import LoraError, ModelLora
from edgeinfer_kernels.matrix import Matrix, MemoryKey
from edgeinfer_kernels.pages import Bytes
from edgeinfer_kernels.sizes.cpu_workspace import Workspace, buffered_tokens, group_offset
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

ALWAYS_USED = ("embed_block", "attention_block", "head_block", "best_tokens_block", "run_schedule")
"""Kernels that every whole decoder needs; layers name the others."""


@dataclass(frozen=True)
class WeightPlacement:
    """Where the weights of a decoder are.

    Of the `matrices` that the kernels multiply, those `in_file` stay memory-mapped: each group of their rows
    is interleaved whenever it is multiplied. The layers of `sparse` read only the weights of active neurons
    in short steps; longer steps read the weights in the per-neuron layout from the file. All others are
    copied to the kernel layout; `on_loaded` is called after each. `packed`: those of another backend, by id.
    `bundles`: the file with the neurons of the sparse layers; None: they are in memory. `streamed`: the
    model's file, from which each step reads these matrices of `in_file` in order.
    """

    matrices: Sequence[Matrix]
    in_file: Sequence[Matrix]
    sparse: SparseLayers
    on_loaded: OnLoaded | None = None
    packed: Mapping[int, PackedMatrix] = field(default_factory=dict)
    bundles: Bundles | None = None
    streamed: StreamedFile | None = None


class CpuDecoder:
    """The embedding and some or all blocks of a decoder, with their buffers for steps of `batch` tokens.

    `blocks`: the weights of the blocks on the CPU; those of a split block only its part here.
    `repacked_bytes` and `repack_seconds` report the amount and duration of repacking.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        blocks: Mapping[BlockIndex, ResidualWeights[Any]],
        state: DecoderState,
        kernels: Kernels,
        threads: ThreadPool,
        batch: int,
        placement: WeightPlacement,
    ) -> None:
        self.spec, self.weights, self.batch = spec, weights, batch
        self.blocks, self.state = blocks, state
        self.arena, self.kernels, self.threads = Arena(), kernels, threads
        self.sizes = ModelSizes.of(spec, weights)
        sparse = placement.sparse
        self._sparse_indices = {
            layer: index for layer in sparse if (index := sparse_index(spec, layer)) and index in blocks
        }
        by_neuron = {layer: blocks[index].block for layer, index in self._sparse_indices.items()}
        in_file = [*placement.in_file, *matrices_by_neuron(by_neuron, sparse)]
        self.packed = dict(placement.packed)
        self.packed |= leave_in_file(in_file, kernels, self.arena, group_offset(self.sizes))
        matrices = [*placement.matrices, *predictor_matrices(sparse)]
        self.repacked = [matrix for matrix in matrices if id(matrix) not in self.packed]
        self.repacked_bytes, self.repack_seconds = 0, 0.0
        if self.repacked:
            self.packed |= self._repack(placement.on_loaded)
        self.workspace = Workspace(self.arena, self.sizes, batch, threads.threads, repack=not in_file)
        scratch = Scratch(self.workspace.scratch, self.workspace.scratch_stride)
        self.embedding = Embedding(
            weights.token_embd, self.arena, kernels, threads, scratch, spec.embedding_scale
        )
        self.per_layer = self._per_layer_embeddings(weights, scratch)
        self.builder = BlockBuilder(self.arena, self.workspace, self.packed, spec.hidden_size)
        self.memories_by_neuron: dict[MemoryKey, tuple[Bytes, MemoryOrder]] = {}
        """The bytes of the matrices of sparse layers that are stored by neuron."""
        self.windows: BundleWindows | None = None
        self._sparse = self._sparse_blocks(by_neuron, sparse, placement.bundles)
        self.stream = self._file_stream(placement)
        self._lora: list[LoraArena | None] = [None]
        """The memory of the adapters in use, which all states share."""

    def _file_stream(self, placement: WeightPlacement) -> FileStream | None:
        """The blocks with matrices that each step reads from the file; None: there are none."""
        if (file := placement.streamed) is None:
            return None
        read = {id(matrix) for matrix in placement.in_file} & file.offsets.keys()
        found = {
            index: [matrix for matrix in residual.block.matrices() if id(matrix) in read]
            for index, residual in self.blocks.items()
        }
        found = {index: matrices for index, matrices in found.items() if matrices}
        if not found:
            return None
        stream = FileStream(file, found, self.packed, self.kernels, self.arena)
        self.threads.checks.append(stream.reader.check)
        return stream

    def _per_layer_embeddings(self, weights: DecoderWeights, scratch: Scratch) -> Embedding | None:
        """The per-layer embeddings; None: the model has none."""
        table = weights.per_layer_token_embd
        if table is None:
            return None
        return Embedding(table, self.arena, self.kernels, self.threads, scratch)

    def write_per_layer(self, ids: Sequence[int]) -> None:
        """Write the rows of the per-layer embeddings of a step's tokens to their buffer."""
        if self.per_layer is not None:
            at, stride = self.workspace.rows("per_layer")
            columns = len(self.spec.layers) * self.spec.per_layer_width
            self.per_layer.write(ids, float_rows(at, len(ids), stride // 4)[:, :columns])

    def _repack(self, on_loaded: OnLoaded | None) -> dict[int, PackedMatrix]:
        """Repack every matrix into the kernel layout; keyed by id."""
        begin = time.perf_counter()
        packed = repack(self.repacked, self.kernels, self.arena, self.threads.threads, on_loaded)
        self.repack_seconds = time.perf_counter() - begin
        self.repacked_bytes = sum(map(interleaved_bytes, self.repacked))
        return packed

    def _sparse_blocks(
        self, blocks: Mapping[int, SparseWeights], layers: SparseLayers, bundles: Bundles | None
    ) -> dict[BlockIndex, int]:
        """The structures of the sparse feed-forwards and experts."""
        if not layers:
            return {}
        indices, threads = self._sparse_indices, self.threads.threads
        width = self.spec.hidden_size
        made = SparseBlocks(self.arena, self.kernels, blocks, layers, threads, width, bundles)
        self.windows = made.windows
        if self.windows is not None:
            self.threads.checks.append(self.windows.reader.check)
        dense = {
            layer: self._dense(index)
            for layer, index in indices.items()
            if not isinstance(blocks[layer], MoeWeights)
        }
        built = {indices[layer]: block for layer, block in made.build(dense, self.builder).items()}
        self.memories_by_neuron = made.memories
        return built

    def _dense(self, index: BlockIndex) -> int:
        self.builder.parallel = self._parallel_matrices(index)
        built = build_block(self.builder, self.spec.residual(index), self.blocks[index], None)
        return built.calls[0].block

    def build(self, options: Callable[[BlockIndex], BlockOptions]) -> None:
        """Build the kernels of all blocks.

        `calls`: of each block in order; before a layer's first block those that precede the layer. `ropes`:
        the RoPE of each layer whose kernels read its table.
        """
        built = {index: self._built(index, options(index)) for index in self.blocks}
        self.calls = {index: list(block.calls) for index, block in built.items()}
        if self.stream is not None:
            self.calls = {index: self.stream.around(index, calls) for index, calls in self.calls.items()}
        for index, block in built.items():
            if block.before_parallel:
                self.calls[self._first_parallel(index)][:0] = block.before_parallel
        for index, block in reversed(built.items()):
            if block.before_layer:
                self.calls[BlockIndex(index.layer, 0)][:0] = block.before_layer
        every = chain.from_iterable(self.calls.values())
        self.ends_everywhere = all(call.ends_everywhere for call in every)
        """Whether every thread sees x after each kernel of a decode step."""
        self.ropes = {index.layer: block.rope for index, block in built.items() if block.rope is not None}

    def give_own_rows(self) -> None:
        """Let each thread compute the norms of short steps itself, if it sees x after every kernel."""
        if self.ends_everywhere:
            self.builder.give_own_rows()

    def functions(self) -> dict[str, int]:
        """The addresses of the kernels that the whole decoder needs, by name."""
        of_blocks = (call.kernel for call in chain.from_iterable(self.calls.values()))
        return {name: self.kernels.address(name) for name in (*ALWAYS_USED, *of_blocks)}

    def schedules(self, functions: Mapping[str, int], joined: StatePool | None) -> StepSchedules:
        """The kernels of each layer in order. `joined`: the states that this decoder's state joins."""
        calls = list(chain.from_iterable(self.calls.values()))
        by_token = {functions[call.kernel] for call in calls if call.ends_by_token}
        if not self.ends_everywhere or (calls and calls[0].begins_by_token):
            by_token.add(functions["embed_block"])
        layers = [self._layer_calls(layer, functions, joined) for layer in range(len(self.spec.layers))]
        x, stride = self.workspace.rows("x")
        runner, everywhere = functions["run_schedule"], bool(calls) and self.ends_everywhere
        return StepSchedules(self.arena, runner, layers, x, stride, by_token, ends_everywhere=everywhere)

    def _layer_calls(
        self, layer: int, functions: Mapping[str, int], joined: StatePool | None
    ) -> list[StepCall]:
        """The kernels of a layer; all share the call of its RoPE and, of joined states, the cache's pages."""
        own = {index: calls for index, calls in self.calls.items() if index.layer == layer}
        tables = () if joined is None else map(joined.page_table, own)
        rope, pages = self.ropes.get(layer), next(filter(None, tables), None)
        calls = chain.from_iterable(own.values())
        return [StepCall(functions[call.kernel], call.block, rope, pages) for call in calls]

    def set_lora(self, lora: ModelLora) -> None:
        """Use these adapters, and no others, in all states. Raises `LoraError`: a kernel takes none."""
        if self._sparse and lora.matrices:
            raise LoraError("layers that read active neurons only (sparse) take no adapter")
        tokens = buffered_tokens(self.sizes, self.batch)
        self._lora[0] = set_lora(lora, self.builder, self.embedding, self.threads.threads, tokens)

    def with_state(self, state: DecoderState) -> "CpuDecoder":
        """A decoder with the same weights and workspace and another state; `build` it before use."""
        other = copy(self)
        other.state = state
        return other

    def feed_forward_rows(self, layer: int, tokens: int) -> tuple[Activations, Activations]:
        """The inputs of the last dense feed-forward of a layer, float32 views, valid until the next block.

        (tokens, hidden_size): the normed x; (tokens, neurons): activation(gate)·up or activation(up).
        """
        weights = dense_layer(self.weights, layer)
        found = []
        for name, columns in (("normed", self.spec.hidden_size), ("hidden", weights.ffn_up.rows)):
            at, stride = self.workspace.rows(name)
            found.append(float_rows(at, tokens, stride // 4)[:, :columns])
        return found[0], found[1]

    def expert_rows(self, index: BlockIndex, tokens: int) -> tuple[npt.NDArray[np.int64], Activations]:
        """The experts of the last step of an MoE block, (tokens, experts per token), and the rows that their
        down projections have read, (tokens, experts per token, neurons).
        """
        return expert_rows(self.calls[index][0].block, tokens)

    def hidden_rows(
        self, index: BlockIndex, tokens: int
    ) -> tuple[Activations, npt.NDArray[np.int64] | None] | None:
        """The hidden rows of a feed-forward or MoE block that has just run, and their experts, as `OnHidden`
        gets them; None: it is another block.
        """
        block = self.spec.residual(index).block
        if isinstance(block, FeedForwardSpec):
            return self.feed_forward_rows(index.layer, tokens)[1], None
        if isinstance(block, MoeSpec):
            experts, hidden = self.expert_rows(index, tokens)
            return hidden, experts
        return None

    def queries(self, index: BlockIndex, tokens: int) -> Activations:
        """(tokens, heads, head_dim): the queries of an attention block that has just run, after RoPE; for a
        q4_0 cache also multiplied with the Hadamard matrix. A view, valid until the next block.
        """
        spec = self.spec.residual(index).block
        assert isinstance(spec, AttentionSpec | LatentAttentionSpec)
        at, stride = self.workspace.rows("queries")
        rows = float_rows(at, tokens, stride // 4)[:, : spec.heads * padded(spec.head_dim)]
        return rows.reshape(tokens, spec.heads, -1)[:, :, : spec.head_dim]

    def _first_parallel(self, index: BlockIndex) -> BlockIndex:
        """The first of the blocks here that share the input of a block."""
        positions = self.spec.layers[index.layer].parallel(index.position)
        same = (BlockIndex(index.layer, position) for position in positions)
        return next(each for each in same if each in self.blocks)

    def _built(self, index: BlockIndex, options: BlockOptions) -> BuiltBlock:
        sparse, is_moe = self._sparse.get(index), isinstance(self.blocks[index].block, MoeWeights)
        if sparse is not None and not is_moe:
            return BuiltBlock((Call("sparse_feed_forward_block", sparse, ends_by_token=True),))
        residual, state = self.spec.residual(index), self.state.get(index)
        self.builder.parallel = self._parallel_matrices(index)
        built = build_block(self.builder, residual, self.blocks[index], state, options)
        return built if sparse is None else with_sparse_experts(built, sparse)

    def _parallel_matrices(self, index: BlockIndex) -> list[Matrix]:
        """The matrices of a block here and of those that share its input; none if no block does."""
        positions = self.spec.layers[index.layer].parallel(index.position)
        found = [self.blocks.get(BlockIndex(index.layer, position)) for position in positions]
        together = [each for each in found if each is not None]
        return [m for each in together for m in each.block.matrices()] if len(together) > 1 else []

    def close(self) -> None:
        """Release the memory."""
        for each in (self.windows, self.stream):
            if each is not None and each.reader.check in self.threads.checks:
                self.threads.checks.remove(each.reader.check)
                each.close()
        self.arena.clear()
