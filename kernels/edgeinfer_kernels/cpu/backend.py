"""The numba backend: one call runs a whole block; int8 activations, quantized weights."""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, Places
from edgeinfer_kernels.cpu.blocks import BlockBuilder, Placed
from edgeinfer_kernels.cpu.compiler.features import usable_cpus
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.draft_loop import MAX_GUESSES, DraftLoop
from edgeinfer_kernels.cpu.embedding import Embedding, Scratch
from edgeinfer_kernels.cpu.expert_blocks import ExpertBlockBuilder, RoutingRows
from edgeinfer_kernels.cpu.layout.packed_matrix import (
    Arena,
    address,
    float_rows,
    int_fields,
    interleaved_bytes,
    quick_address,
)
from edgeinfer_kernels.cpu.layout.repacking import OnPlaced, leave_in_file, repack
from edgeinfer_kernels.cpu.layout.unpacked_rows import UnpackedRows
from edgeinfer_kernels.cpu.runtime.abi import CALL, ENDS_BY_TOKEN, HEAD, STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.schedule import LayerBlocks, StepSchedules
from edgeinfer_kernels.cpu.runtime.step_args import PlaceTable, fill_call
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import (
    SparseBuilder,
    SparseLayers,
    matrices_by_neuron,
    predictor_matrices,
)
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest
from edgeinfer_kernels.expert_routing import Routing
from edgeinfer_kernels.layer_cache import LayerCache, padded
from edgeinfer_kernels.reference.backend import last_norm
from edgeinfer_kernels.sizes.cpu_workspace import Workspace, group_offset
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, FeedForwardWeights, Matrix

ALWAYS_USED = ("embed_block", "attention_block", "head_block", "run_program")
"""Kernels that every model needs; layers name the others."""


class CpuBackend:
    """A decoder on the CPU.

    Weights are repacked at load time, so the pages of the file can be released. The blocks `in_file` stay
    memory-mapped; each group of their rows is interleaved whenever it is multiplied. `repacked_bytes` and
    `repack_seconds` report the amount and duration of repacking. `kernels` are those of
    `kernel_units(weights)`. `threads` None: all CPUs available to this process. `head` False: another backend
    continues after the last layer, and there are no logits. `routing`: buffer for the experts of MoE layers.
    `team`: the thread pool of another backend, which keeps ownership; two pools that run alternately slow
    each other down.

    The layers of `sparse` read only the weights of active neurons in short steps. Longer steps read the
    weights in the per-neuron layout from the file instead.
    """

    name = "cpu"
    most_placed = most_stepped = STEP_TOKENS

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        kernels: Kernels,
        *,
        batch: int = 256,
        threads: int | None = None,
        in_file: Sequence[Matrix] = (),
        sparse: SparseLayers | None = None,
        head: bool = True,
        on_placed: OnPlaced | None = None,
        routing: Routing | None = None,
        team: ThreadPool | None = None,
    ) -> None:
        self.specification = specification
        self.weights = weights
        self.batch = batch
        self._arena = Arena()
        self._sizes = ModelSizes.of(specification, weights)
        self._kernels = kernels
        self.routing = routing
        sparse = sparse or {}
        self.team = team or ThreadPool(self._kernels, threads or usable_cpus())
        self._has_own_team = team is None
        self.repacked_bytes, self.repack_seconds = 0, 0.0
        matrices = [*weights.matrices(head=head), *predictor_matrices(sparse)]
        mapped = [*in_file, *matrices_by_neuron(weights, sparse)]
        placed = leave_in_file(mapped, kernels, self._arena, group_offset(self._sizes))
        moved = [matrix for matrix in matrices if id(matrix) not in placed]
        if moved:
            placed |= self._repack(moved, on_placed)
        self._build(weights, caches, placed, not mapped, head, routing)
        self._make_sparse(sparse)

    def _repack(self, matrices: list[Matrix], on_placed: OnPlaced | None) -> dict[int, Placed]:
        """Repack every matrix into the kernel layout; keyed by id."""
        begin = time.perf_counter()
        placed = repack(matrices, self._kernels, self._arena, self.team.threads, on_placed)
        self.repack_seconds = time.perf_counter() - begin
        self.repacked_bytes = sum(map(interleaved_bytes, matrices))
        return placed

    def _build(
        self,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        placed: dict[int, Placed],
        repack: bool,
        head: bool,
        routing: Routing | None,
    ) -> None:
        facts = self.specification
        self._workspace = Workspace(self._arena, self._sizes, self.batch, self.team.threads, repack)
        workspace = self._workspace
        scratch = Scratch(workspace.scratch, workspace.scratch_stride)
        table, scale = weights.token_embd, facts.embedding_scale
        self._embedding = Embedding(table, self._arena, self._kernels, self.team, scratch, scale)
        builder = BlockBuilder(self._arena, workspace, placed, facts.width)
        self._attention = [
            builder.attention(layer.attention, w.attention, cache)
            for layer, w, cache in zip(facts.layers, weights.layers, caches, strict=True)
        ]
        self._feed_forward = [
            self._feed_forward_step(builder, index, w.feed_forward, routing)
            for index, w in enumerate(weights.layers)
        ]
        self._head = builder.head(facts.norm, weights) if head else 0
        if head:
            self._head_fields = int_fields(self._head, len(HEAD))
        self._x = float_rows(workspace.rows("x")[0], self.batch, padded(facts.width))
        self._call = np.zeros(len(CALL), np.int64)
        self._call_address = address(self._call)
        self._builder = builder

    def _make_sparse(self, layers: SparseLayers) -> None:
        """Replace the feed-forwards of these layers by sparse blocks, then rebuild the schedule."""
        if layers:
            name, threads = "sparse_feed_forward_block", self.team.threads
            made = SparseBuilder(
                self._arena, self._kernels, self.specification, self.weights, layers, threads
            )
            dense = {layer: self._feed_forward[layer][1] for layer in layers}
            for layer, block in made.blocks(dense, self._builder).items():
                self._feed_forward[layer] = name, block
        self._build_program()

    def _feed_forward_step(
        self,
        builder: BlockBuilder,
        layer: int,
        w: FeedForwardWeights | ExpertWeights,
        routing: Routing | None,
    ) -> tuple[str, int]:
        """The kernel name of the layer's second block and the address of its structure."""
        facts = self.specification.layers[layer].feed_forward
        if isinstance(w, FeedForwardWeights):
            assert not isinstance(facts, ExpertsSpecification)
            return "feed_forward_block", builder.feed_forward(facts, w)
        assert isinstance(facts, ExpertsSpecification)
        rows = None
        if routing is not None:
            ids = routing.ids[layer]
            rows = RoutingRows(self._arena.keep(ids), ids.strides[0])
        return "experts_block", ExpertBlockBuilder(builder).experts(facts, w, rows)

    def _routes_early(self, layer: int) -> bool:
        facts = self.specification.layers[layer].feed_forward
        return isinstance(facts, ExpertsSpecification) and facts.early

    def _build_program(self) -> None:
        """Build the schedules: the blocks of all layers, and all blocks of a step."""
        early = ["route_block"] if any(map(self._routes_early, range(len(self._feed_forward)))) else []
        used = [*ALWAYS_USED, *early, *(name for name, _ in self._feed_forward)]
        self._functions = {name: self._kernels.address(name) for name in used}
        layers = [self._layer_blocks(layer) for layer in range(len(self._attention))]
        x, stride = self._workspace.rows("x")
        runner = self._functions["run_program"]
        by_token = {self._functions[name] for name in ENDS_BY_TOKEN if name in self._functions}
        self._programs = StepSchedules(self._arena, runner, layers, x, stride, by_token)
        self._layers_run = self._programs.of_layers(range(len(layers)))
        self._step_ids = np.zeros(STEP_TOKENS, np.int64)
        self._step_ids_address = address(self._step_ids)
        embed = self._embedding.block
        before = [(self._functions["embed_block"], embed)] if embed else []
        if self._head:
            head = self._functions["head_block"], self._head
            self._step_run = self._programs.whole(before, head, self._call_address)
        self._guess_loop: DraftLoop | None = None
        self._logits_room = UnpackedRows(padded(self.specification.vocabulary_size))

    def _layer_blocks(self, layer: int) -> LayerBlocks:
        name, block = self._feed_forward[layer]
        steps = [(self._functions["attention_block"], self._attention[layer]), (self._functions[name], block)]
        if self._routes_early(layer):
            steps.insert(0, (self._functions["route_block"], block))
        return LayerBlocks(tuple(steps), self.specification.layers[layer].attention.rope)

    def embed(self, ids: Sequence[int]) -> Activations:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        x = self._x[: len(ids), : self.specification.width]
        self._embedding.write(ids, x)
        return x

    def _run(self, function: str, block: int, x: Activations, start: int = 0, rope: int = 0) -> None:
        fill_call(self._call, quick_address(x), x.strides[0], len(x), start, rope)
        self.team.run(self._functions[function], block, self._call_address)

    def all_layers(self, x: Activations, start: int) -> None:
        # Longer steps return to Python between two blocks: the cost is negligible, and Ctrl-C is handled
        # there.
        if len(x) > STEP_TOKENS:
            for layer in range(len(self.specification.layers)):
                self.attention_block(layer, x, start)
                self.feed_forward_block(layer, x)
            return
        self._programs.fill(len(x), start, x=quick_address(x))
        self.team.run(*self._layers_run)

    def logits_behind(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """As `embed`, `all_layers` and `logits`, in one run of the thread pool."""
        count, programs = len(ids), self._programs
        if self._embedding.block:
            self._step_ids[:count] = ids
            self._embedding.ask(self._step_ids_address)
        else:
            self.embed(ids)
        programs.fill(count, start)
        fill_call(self._call, programs.x, programs.stride, count, 0, 0)
        whole = self._room_for_logits(count)
        self.team.run(*self._step_run)
        return self._finished(whole)

    @property
    def most_given(self) -> int:
        """As `DraftingBackend.most_given`.

        0 unless kernels can decode the embeddings and the logits need only a scale after the head.
        """
        possible = self._head and self._embedding.block and not self.specification.logit_soft_cap
        return min(MAX_GUESSES, self.batch) if possible else 0

    def guesses(self, ids: Sequence[int], start: int, wanted: DraftRequest) -> DraftedTokens:
        """As `DraftingBackend.guesses`: one run of the thread pool for the whole draft."""
        if self._guess_loop is None:
            block, steps = self._embedding.block, self._step_run[1:]
            head = self._call, self._head_fields
            made = DraftLoop(self.specification, self._kernels, self._programs, steps, block, head)
            self._guess_loop = made
        return self._guess_loop.run(self.team, ids, start, wanted)

    def some_layers(self, x: Activations, start: int, layers: Sequence[int]) -> None:
        """Run both blocks of these layers, for a step of at most STEP_TOKENS."""
        self._programs.fill(len(x), start, x=quick_address(x))
        self.team.run(*self._programs.of_layers(layers))

    def all_layers_at(self, x: Activations, places: Places) -> None:
        """Run both blocks of every layer for tokens of several sequences, at most `most_placed` tokens."""
        if len(x) > STEP_TOKENS:
            raise ValueError(f"{len(x)} tokens at places of their own; {STEP_TOKENS} go in one step")
        table, start = PlaceTable(places), int(places.positions.min())
        span = int(places.positions.max()) + 1 - start
        self._programs.fill(len(x), start, table.address, span, quick_address(x))
        self.team.run(*self._layers_run)

    def attention_block(self, layer: int, x: Activations, start: int) -> None:
        if self._routes_early(layer):
            self._run("route_block", self._feed_forward[layer][1], x)
        rope = self._programs.tables[layer].address_of(start, len(x))
        self._run("attention_block", self._attention[layer], x, start, rope)

    def feed_forward_block(self, layer: int, x: Activations) -> None:
        function, block = self._feed_forward[layer]
        self._run(function, block, x)

    def feed_forward_rows(self, layer: int, tokens: int) -> tuple[Activations, Activations]:
        """The inputs of the last dense feed-forward of a layer, float32 views, valid until the next block.

        (tokens, hidden_size): the normed x; (tokens, neurons): activation(gate)·up or activation(up).
        """
        weights = self.weights.layers[layer].feed_forward
        assert isinstance(weights, FeedForwardWeights)
        found = []
        for name, columns in (("normed", self.specification.width), ("hidden", weights.ffn_up.rows)):
            at, stride = self._workspace.rows(name)
            found.append(float_rows(at, tokens, stride // 4)[:, :columns])
        return found[0], found[1]

    def queries(self, layer: int, tokens: int) -> Activations:
        """(tokens, heads, head_dim): the queries of the layer's last attention block, after RoPE; for a q4_0
        cache also multiplied with the Hadamard matrix. A view, valid until the next block.
        """
        facts = self.specification.layers[layer].attention
        at, stride = self._workspace.rows("queries")
        rows = float_rows(at, tokens, stride // 4)[:, : facts.heads * padded(facts.head_dim)]
        return rows.reshape(tokens, facts.heads, -1)[:, :, : facts.head_dim]

    def logits(self, x: Activations) -> npt.NDArray[np.float32]:
        whole = self._room_for_logits(len(x))
        self._run("head_block", self._head, x)
        return self._finished(whole)

    def _room_for_logits(self, rows: int) -> npt.NDArray[np.float32]:
        """The output buffer of the head kernel."""
        whole = self._logits_room.rows(rows)
        self._head_fields[HEAD.logits // 8] = quick_address(whole)
        return whole

    def _finished(self, whole: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The output of the head kernel, scaled and soft-capped."""
        facts = self.specification
        out = whole[:, : facts.vocabulary_size]
        if facts.logit_scale != 1.0:
            out *= np.float32(facts.logit_scale)
        if facts.logit_soft_cap:
            out /= np.float32(facts.logit_soft_cap)
            np.tanh(out, out)
            out *= np.float32(facts.logit_soft_cap)
        return out

    def normed(self, x: Activations) -> npt.NDArray[np.float32]:
        return last_norm(self.specification, self.weights, np.asarray(x)).astype(np.float32)

    def close(self) -> None:
        if self._has_own_team:
            self.team.close()
        self._arena.clear()
