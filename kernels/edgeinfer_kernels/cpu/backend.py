"""The numba backend: whole blocks in one call, int8 activations against quantised rows."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from struct import pack_into

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, LayerCache, padded
from edgeinfer_kernels.cpu.blocks import BlockBuilder, Placed
from edgeinfer_kernels.cpu.embedding import Embedding
from edgeinfer_kernels.cpu.features import usable_cpus
from edgeinfer_kernels.cpu.file_rows import file_rows
from edgeinfer_kernels.cpu.memory import (
    Arena,
    address,
    float_rows,
    int_fields,
    interleave,
    interleaved_bytes,
    kernel_format,
    quick_address,
)
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cpu.sparse import (
    SparseBuilder,
    SparseLayers,
    matrices_by_neuron,
    predictor_matrices,
)
from edgeinfer_kernels.cpu.structures import CALL, HEAD
from edgeinfer_kernels.cpu.threads import Team
from edgeinfer_kernels.cpu.workspace import Workspace, group_offset
from edgeinfer_kernels.specification import DecoderSpecification, RopeSpecification
from edgeinfer_kernels.weights import DecoderWeights, Matrix

OnPlaced = Callable[[Matrix], None]
"""Called when a matrix lies in the kernels' layout and its file's bytes aren't needed any more."""


PROGRAM_TOKENS = 16
"""Steps of so many tokens go up all layers in one call. Longer ones come back to Python between two blocks,
where it costs next to nothing and Ctrl-C is heard.
"""


ROPE_POSITIONS = 256
"""Positions whose cosines and sines are computed together: one by one they'd cost 50 us a token."""


class _RopeTable:
    """Cosines and sines of the positions last asked for and some behind them; without a `rope`, none."""

    def __init__(self, rope: RopeSpecification | None) -> None:
        self._rope = rope
        self._start = self._end = 0

    def address_of(self, start: int, count: int) -> int:
        """Where `count` positions from `start` on lie, 0 without RoPE; made for many positions at a time."""
        if self._rope is None:
            return 0
        if not self._start <= start <= start + count <= self._end:
            self._table = self._rope.table(start, max(count, ROPE_POSITIONS))
            self._start, self._end = start, start + len(self._table)
            self._address, self._stride = address(self._table), self._table.strides[0]
        return self._address + (start - self._start) * self._stride


CALL_FIELDS = f"{len(CALL)}q"


def _fill(call: npt.NDArray[np.int64], x: Activations, start: int, rope: int) -> None:
    """Write a CALL; without RoPE `rope` is 0."""
    pack_into(CALL_FIELDS, call.data, 0, quick_address(x), x.strides[0], len(x), start, rope)


def kernel_formats(weights: DecoderWeights, sparse: SparseLayers | None = None) -> set[str]:
    """The formats whose row kernels a model needs. Raises `UnsupportedFormatError`."""
    matrices = [*weights.matrices(), *predictor_matrices(sparse or {})]
    return {kernel_format(matrix) for matrix in matrices}


def sparse_kernel_formats(weights: DecoderWeights, layers: SparseLayers) -> set[str]:
    """The formats in which sparse layers are read neuron by neuron."""
    return {matrix.format for matrix in matrices_by_neuron(weights, layers)}


class CpuBackend:
    """A decoder on the processor.

    Weights are repacked at load, so that the file's pages can go; or, with `repack` False, stay where the
    file is mapped, and each group of rows is brought into the kernels' layout whenever it is multiplied with.
    `repacked_bytes` and `repack_seconds` say what was done. `kernels` are those of `kernel_formats(weights)`.
    `threads` None: all that this process may use.

    Layers of `sparse` read the weights of active neurons only while steps are short; longer steps read what
    lies by neuron from the file. `kernels` are those of `sparse_kernel_formats` then too.
    """

    name = "cpu"

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        kernels: Kernels,
        *,
        batch: int = 256,
        threads: int | None = None,
        repack: bool = True,
        sparse: SparseLayers | None = None,
        on_placed: OnPlaced | None = None,
    ) -> None:
        self.specification = specification
        self.weights = weights
        self.batch = batch
        self._arena = Arena()
        self._kernels = kernels
        sparse = sparse or {}
        self.team = Team(self._kernels, threads or usable_cpus())
        self.repacked_bytes, self.repack_seconds = 0, 0.0
        matrices, placed = [*weights.matrices(), *predictor_matrices(sparse)], {}
        in_file = matrices_by_neuron(weights, sparse) if repack else matrices
        if in_file:
            placed = self._leave_in_file(in_file)
            repack = False
        placed |= self._repack([matrix for matrix in matrices if id(matrix) not in placed], on_placed)
        self._build(weights, caches, placed, repack, sparse)

    def _leave_in_file(self, matrices: list[Matrix]) -> dict[int, Placed]:
        """Every matrix where its file is mapped, by id."""
        kernel, offset = self._kernels.address("rows_in_file"), group_offset(self.specification)
        return {
            id(matrix): Placed(kernel, file_rows(matrix, self._arena, self._kernels, offset))
            for matrix in matrices
        }

    def _repack(self, matrices: list[Matrix], on_placed: OnPlaced | None) -> dict[int, Placed]:
        """Move every matrix into the kernels' layout; by id."""
        placed, begin = {}, time.perf_counter()
        with ThreadPoolExecutor(max_workers=self.team.threads) as pool:
            for matrix, memory in zip(
                matrices, pool.map(lambda m: interleave(m, self._kernels), matrices), strict=True
            ):
                name = f"rows_{kernel_format(matrix)}"
                kernel, by_tiles = self._kernels.address(name), self._kernels.find(f"tile_{name}")
                placed[id(matrix)] = Placed(kernel, self._arena.keep(memory), by_tiles)
                self.repacked_bytes += interleaved_bytes(matrix)
                if on_placed:
                    on_placed(matrix)
        self.repack_seconds = time.perf_counter() - begin
        return placed

    def _build(
        self,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        placed: dict[int, Placed],
        repack: bool,
        sparse: SparseLayers,
    ) -> None:
        facts = self.specification
        workspace = Workspace(self._arena, facts, weights, self.batch, self.team.threads, repack)
        self._workspace = workspace
        self._neurons = [layer.feed_forward.ffn_up.rows for layer in weights.layers]
        self._embedding = Embedding(weights.token_embd, self._arena, self._kernels, workspace.scratch)
        builder = BlockBuilder(self._arena, workspace, placed, facts.width)
        self._attention = [
            builder.attention(layer.attention, w.attention, cache)
            for layer, w, cache in zip(facts.layers, weights.layers, caches, strict=True)
        ]
        self._feed_forward = [
            builder.feed_forward(layer.feed_forward, w.feed_forward)
            for layer, w in zip(facts.layers, weights.layers, strict=True)
        ]
        self._sparse = self._sparse_blocks(builder, weights, sparse)
        self._head = builder.head(facts.norm, weights)
        self._head_fields = int_fields(self._head, len(HEAD))
        self._x_address = workspace.rows("x")[0]
        self._x = float_rows(self._x_address, self.batch, padded(facts.width))
        self._call = np.zeros(len(CALL), np.int64)
        self._call_address = address(self._call)
        self._functions = {
            name: self._kernels.address(name)
            for name in ("attention_block", "feed_forward_block", "head_block", "run_program")
        }
        if sparse:
            self._functions["sparse_feed_forward_block"] = self._kernels.address("sparse_feed_forward_block")
        self._build_program()

    def _sparse_blocks(
        self, builder: BlockBuilder, weights: DecoderWeights, sparse: SparseLayers
    ) -> dict[int, int]:
        """The sparse layers' blocks, by layer; they know the dense ones."""
        if not sparse:
            return {}
        by_neuron = SparseBuilder(
            self._arena, self._kernels, self.specification, weights, sparse, self.team.threads
        )
        with ThreadPoolExecutor(max_workers=self.team.threads) as pool:
            made = pool.map(lambda i: by_neuron.block(i, self._feed_forward[i], builder), sparse)
            return dict(zip(sparse, made, strict=True))

    def _feed_forward_of(self, layer: int) -> tuple[str, int]:
        """The function and the block of a layer's feed-forward."""
        if layer in self._sparse:
            return "sparse_feed_forward_block", self._sparse[layer]
        return "feed_forward_block", self._feed_forward[layer]

    def _build_program(self) -> None:
        """The blocks of all layers as one list for the team, with a call for each kind of RoPE."""
        ropes = [layer.attention.rope for layer in self.specification.layers]
        tables = {rope: _RopeTable(rope) for rope in ropes}
        calls = {rope: np.zeros(len(CALL), np.int64) for rope in ropes}
        # Looked up by layer and by turn, as to hash a specification takes 10 us a token.
        self._layer_tables = [tables[rope] for rope in ropes]
        self._calls = [(tables[rope], calls[rope]) for rope in tables]
        steps = []
        for layer, (rope, attention) in enumerate(zip(ropes, self._attention, strict=True)):
            call = address(calls[rope])
            function, feed_forward = self._feed_forward_of(layer)
            steps.append((self._functions["attention_block"], attention, call))
            steps.append((self._functions[function], feed_forward, call))
        self._program = np.array(steps, np.int64)
        self._steps = np.array([len(steps)], np.int64)
        self._run_program = self._functions["run_program"], address(self._program), address(self._steps)

    def embed(self, ids: Sequence[int]) -> Activations:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        x = self._x[: len(ids), : self.specification.width]
        self._embedding.write(ids, x, self._x_address)
        if self.specification.embedding_scale != 1.0:
            x *= np.float32(self.specification.embedding_scale)
        return x

    def _run(self, function: str, block: int, x: Activations, start: int = 0, rope: int = 0) -> None:
        _fill(self._call, x, start, rope)
        self.team.run(self._functions[function], block, self._call_address)

    def all_layers(self, x: Activations, start: int) -> None:
        if len(x) > PROGRAM_TOKENS:
            for layer in range(len(self.specification.layers)):
                self.attention_block(layer, x, start)
                self.feed_forward_block(layer, x)
            return
        for table, call in self._calls:
            _fill(call, x, start, table.address_of(start, len(x)))
        self.team.run(*self._run_program)

    def attention_block(self, layer: int, x: Activations, start: int) -> None:
        rope = self._layer_tables[layer].address_of(start, len(x))
        self._run("attention_block", self._attention[layer], x, start, rope)

    def feed_forward_block(self, layer: int, x: Activations) -> None:
        self._run(*self._feed_forward_of(layer), x)

    def feed_forward_rows(self, layer: int, tokens: int) -> tuple[Activations, Activations]:
        """What the dense feed-forward block of a layer has just multiplied with: (tokens, width), the normed
        x; (tokens, neurons), activation(gate)·up or activation(up). Views, valid until the next block.
        """
        found = []
        for name, columns in (("normed", self.specification.width), ("hidden", self._neurons[layer])):
            at, stride = self._workspace.rows(name)
            found.append(float_rows(at, tokens, stride // 4)[:, :columns])
        return found[0], found[1]

    def logits(self, x: Activations) -> npt.NDArray[np.float32]:
        facts = self.specification
        whole = np.empty((len(x), padded(facts.vocabulary_size)), np.float32)
        self._head_fields[HEAD.logits // 8] = quick_address(whole)
        self._run("head_block", self._head, x)
        out = whole[:, : facts.vocabulary_size]
        if facts.logit_scale != 1.0:
            out *= np.float32(facts.logit_scale)
        if facts.logit_soft_cap:
            out /= np.float32(facts.logit_soft_cap)
            np.tanh(out, out)
            out *= np.float32(facts.logit_soft_cap)
        return out

    def close(self) -> None:
        self.team.close()
        self._arena.clear()
