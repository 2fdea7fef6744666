"""The numba backend: one call runs a whole block; int8 activations, quantized weights."""

from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import addressof, c_int64, memmove
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, BatchPositions, OnHidden
from edgeinfer_kernels.blocks.encoder_attention import CPU_TEXT_TOKENS, TEXT_BOUNDS, text_bounds
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.cpu.attention_scores import attention_scores
from edgeinfer_kernels.cpu.block_builder import BlockOptions, PackedMatrix, RoutingRows
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder, WeightPlacement
from edgeinfer_kernels.cpu.disk.bundle_windows import Bundles
from edgeinfer_kernels.cpu.disk.file_stream import StreamedFile
from edgeinfer_kernels.cpu.draft.draft_loop import has_plain_logits
from edgeinfer_kernels.cpu.draft.draft_steps import DraftSteps
from edgeinfer_kernels.cpu.draft.hidden_states import KeptStates
from edgeinfer_kernels.cpu.joined_states import JoinedStates
from edgeinfer_kernels.cpu.layout.packed_matrix import address, float_rows
from edgeinfer_kernels.cpu.layout.repacking import OnLoaded
from edgeinfer_kernels.cpu.runtime.abi import MAX_DRAFT_CYCLES, MAX_DRAFT_TOKENS, STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import EmbedArgs, HeadArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import (
    BestTokens,
    HeadOutput,
    PositionTable,
    fill_slots,
    fill_step,
    quick_address,
)
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState, Routing, StatePool
from edgeinfer_kernels.lora.weights import ModelLora
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.reference.backend import add_position_rows, final_norm
from edgeinfer_kernels.system.processor import usable_cpus


@dataclass(frozen=True)
class CpuOptions:
    """How a decoder is loaded on the CPU.

    `batch`: maximum tokens of a forward. `threads` None: all CPUs available to this process. The matrices
    `in_file` stay memory-mapped; each group of their rows is interleaved whenever it is multiplied. The
    layers of `sparse` read only the weights of active neurons in short steps. Longer steps read the weights
    in the per-neuron layout from the file instead. `head` False: another backend continues after the last
    layer, and there are no logits. `packed`: matrices that another backend has packed, by id. `bundles`: the
    file from which active neurons of the sparse layers are read; None: all are in memory. `streamed`: the
    model's file, from which each step reads those of the matrices `in_file` in order.
    """

    batch: int = 256
    threads: int | None = None
    in_file: Sequence[Matrix] = ()
    sparse: SparseLayers = field(default_factory=dict)
    head: bool = True
    packed: Mapping[int, PackedMatrix] = field(default_factory=dict)
    bundles: Bundles | None = None
    streamed: StreamedFile | None = None


class CpuBackend(DraftSteps):
    """A decoder on the CPU.

    Weights are repacked at load time, so the pages of the file can be released. `repacked_bytes` and
    `repack_seconds` report the amount and duration of repacking. `kernels` are those of
    `kernel_units(weights)`. `routing`: buffer for the experts of MoE layers. `pool`: the thread pool of
    another backend, which keeps ownership; two pools that run alternately slow each other down.
    """

    name = "cpu"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        state: DecoderState,
        kernels: Kernels,
        options: CpuOptions,
        *,
        on_loaded: OnLoaded | None = None,
        routing: Routing | None = None,
        pool: ThreadPool | None = None,
    ) -> None:
        self.spec, self.weights, self.state = spec, weights, state
        self.batch, self.routing, self._kernels = options.batch, routing, kernels
        self.pool = pool or ThreadPool(kernels, options.threads or usable_cpus())
        self._owns_pool = pool is None
        self._pool: StatePool | None = None
        """The states that `state` joins."""
        self._joined: JoinedStates | None = None
        self.on_hidden: OnHidden | None = None
        self._kept = KeptStates(spec.hidden_size)
        placement = WeightPlacement(
            weights.matrices(head=options.head),
            options.in_file,
            options.sparse,
            on_loaded,
            options.packed,
            options.bundles,
            options.streamed,
        )
        blocks = {index: weights.residual(index) for index in spec.indices()}
        self.decoder = CpuDecoder(spec, weights, blocks, state, kernels, self.pool, self.batch, placement)
        self.repacked_bytes = self.decoder.repacked_bytes
        self.repack_seconds = self.decoder.repack_seconds
        self._build(options.head)
        self.capabilities = self._capabilities()

    def _capabilities(self) -> Capabilities:
        return Capabilities(
            max_step_tokens=min(self.batch, STEP_TOKENS),
            max_batch_tokens=STEP_TOKENS,
            max_tree_tokens=STEP_TOKENS if self.state.recent is None else 0,
            has_recurrent_trees=True,
            max_draft_prompt=min(MAX_DRAFT_TOKENS, self.batch) if self._can_draft else 0,
            ends_drafts=True,
            max_draft_cycles=MAX_DRAFT_CYCLES if self._runs_cycles else 0,
            text_tokens=min(self.batch, CPU_TEXT_TOKENS),
            skips_layers=True,
            has_attention_scores=True,
            has_separate_states=True,
            max_joined_tokens=STEP_TOKENS,
            can_evict=True,
            takes_lora=True,
            hands_out_hidden=True,
            finds_best=self._best is not None,
            limits_output=self._head != 0,
            is_fork_safe=self.decoder.windows is None and self.decoder.stream is None,
        ).limited_to(self.spec)

    def _build(self, head: bool) -> None:
        """Build the structures of all blocks and of the head, the buffers, and the schedules."""
        decoder, spec = self.decoder, self.spec
        self._workspace, self._embedding = decoder.workspace, decoder.embedding
        decoder.build(self._options)
        self._head = decoder.builder.head(spec.norm, self.weights) if head else 0
        if head:
            self._output = HeadOutput(HeadArgs.from_address(self._head), spec, self.weights.output_bias)
        decoder.give_own_rows()
        self._x = float_rows(self._workspace.rows("x")[0], self.batch, padded(spec.hidden_size))
        self._step_args = StepArgs()
        self._step_address = addressof(self._step_args)
        self._build_schedules()

    def _options(self, index: BlockIndex) -> BlockOptions:
        if self.routing is None:
            return BlockOptions()
        ids = self.routing.ids[index.layer]
        return BlockOptions(RoutingRows(self.decoder.arena.keep(ids), ids.strides[0]))

    def _build_schedules(self) -> None:
        """Build the schedules: the blocks of all layers, and all blocks of a step."""
        layers = range(len(self.spec.layers))
        self._functions = self.decoder.functions()
        self._schedules = self.decoder.schedules(self._functions, self._pool)
        ropes = map(self.decoder.ropes.get, layers)
        self._tables = [self._schedules.table_of(rope) for rope in ropes]
        self._layers_run = self._schedules.of_layers(layers)
        if self.state.recent is not None:
            for args in (self._step_args, *(args for _, args in self._schedules.step_args)):
                args.recent = address(self.state.recent.table)
        # Lists are copied to and from arrays of ctypes in half the time of numpy's.
        self._step_ids = (c_int64 * STEP_TOKENS)()
        self._step_ids_address = addressof(self._step_ids)
        embed = self._embedding.block
        if embed:
            self._embed_args = EmbedArgs.from_address(embed)
        before = [(self._functions["embed_block"], embed)] if embed else []
        self._best = self._best_tokens()
        if self._head:
            head = self._functions["head_block"], self._head
            self._step_run = self._schedules.whole(before, [head], self._step_address)
        if self._best:
            self._best_calls = [head, (self._functions["best_tokens_block"], self._best.block)]
            self._best_runs = [self._schedules.whole(before, self._best_calls, self._step_address)]
        self._forget_drafts()

    def _best_tokens(self) -> BestTokens | None:
        """Where a step's best tokens are found; None: only from the logits on the host."""
        is_plain = has_plain_logits(self.spec, self.weights) and self.weights.output_ids is None
        size, scale = self.spec.vocabulary_size, self.spec.logit_scale
        return BestTokens(size, scale) if self._head and is_plain else None

    def embed(self, ids: Sequence[int]) -> Activations:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        x = self._x[: len(ids), : self.spec.hidden_size]
        self._embedding.write(ids, x)
        if self.spec.per_layer_width:
            self.decoder.write_per_layer(ids)
        return x

    def forward(self, x: Activations, start: int) -> None:
        # Longer steps return to Python between two blocks: the cost is negligible, and Ctrl-C is handled
        # there.
        if len(x) > STEP_TOKENS:
            self._run_blocks(x, start)
            return
        self._touch_recent(start, len(x))
        self._schedules.fill(len(x), start, x=quick_address(x))
        self._fill_slots(len(x), start)
        self._run_layers(x)

    def _run_layers(self, x: Activations) -> None:
        """Run the schedule of all layers, in parts if states between them are kept."""
        if not self._kept.inner:
            self.pool.run(*self._layers_run)
            return
        for first, last in self._kept.parts(x):
            self.pool.run(*self._schedules.of_layers(range(first, last)))

    def forward_texts(self, x: Activations, lengths: Sequence[int]) -> None:
        bounds = text_bounds(np.asarray(lengths, np.int64))
        at, _ = self._workspace.rows(TEXT_BOUNDS)
        memmove(at, address(bounds), bounds.nbytes)
        add_position_rows(self.weights, x, bounds)
        self.forward(x, 0)

    def _touch_recent(self, start: int, tokens: int) -> None:
        """Give the step's positions slots for f16, if the caches have them."""
        if self.state.recent is not None:
            self.state.recent.touch(start, tokens)

    def _fill_slots(self, tokens: int, start: int) -> None:
        """Set the slots of recurrent states for a step."""
        if self.state.slots is not None:
            self._schedules.fill_slots(self.state.slots.begin(start, tokens))

    def step_logits(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """As `Backend.step_logits`, in one run of the thread pool."""
        if self._kept.inner:
            x = self.embed(ids)
            self.forward(x, start)
            return self.logits(x)
        self._fill_whole(ids, start)
        whole = self._output.rows(len(ids))
        self.pool.run(*self._step_run)
        return self._output.logits(whole)

    def _fill_whole(self, ids: Sequence[int], start: int, span: int = 0) -> None:
        """Fill the arguments of a schedule from the embedding to the head; `span`: as of
        `StepSchedules.fill`.
        """
        count, schedules = len(ids), self._schedules
        if self._embedding.block:
            self._step_ids[:count] = list(ids)
            self._embed_args.ids = self._step_ids_address
            if self.spec.per_layer_width:
                self.decoder.write_per_layer(ids)
        else:
            self.embed(ids)
        self._touch_recent(start, count)
        schedules.fill(count, start, span=span)
        self._fill_slots(count, start)
        fill_step(self._step_args, schedules.x, schedules.stride, count, 0, 0)

    def forward_layers(self, x: Activations, start: int, layers: Sequence[int]) -> None:
        """As `Backend.forward_layers`."""
        if len(x) > STEP_TOKENS:
            self._run_blocks(x, start, layers=layers)
            return
        self._touch_recent(start, len(x))
        self._schedules.fill(len(x), start, x=quick_address(x))
        self.pool.run(*self._schedules.of_layers(layers))

    def forward_batch(self, x: Activations, positions: BatchPositions) -> None:
        recent = None
        if self.state.recent is not None:
            recent = self.state.recent.touch_batch(positions.positions, positions.pages)
        table, start = PositionTable(positions, recent), int(positions.positions.min())
        span = int(positions.positions.max()) + 1 - start
        if len(x) > STEP_TOKENS:
            if span != len(x):
                raise ValueError(
                    f"saw a batch of {len(x)} tokens, wanted {STEP_TOKENS} at most, or a chunk of one prompt"
                )
            self._run_blocks(x, start, table.address)
            return
        self._schedules.fill(len(x), start, table.address, span, quick_address(x))
        self._run_layers(x)

    def forward_tree(self, x: Activations, start: int, parents: Sequence[int]) -> None:
        slots = self.state.slots
        if slots is None:
            super().forward_tree(x, start, parents)
            return
        before = np.array([-1, *(parent + 1 for parent in parents)], np.int64)
        step = slots.begin_tree(start, len(x))
        self._schedules.fill_slots(step, address(before))
        try:
            super().forward_tree(x, start, parents)
        finally:
            self._schedules.fill_slots(step)

    def with_state(self, state: DecoderState) -> "CpuBackend":
        return self._on(state, None)

    def joined(self, pool: StatePool) -> "CpuBackend":
        other = self._on(pool.joined, pool)
        other._joined = JoinedStates(pool, other._schedules)
        return other

    def _on(self, state: DecoderState, pool: StatePool | None) -> "CpuBackend":
        """The same weights and buffers with another state, maybe that of a pool."""
        other = copy(self)
        other.state, other._owns_pool, other._pool = state, False, pool
        other.decoder = self.decoder.with_state(state)
        other._build(bool(self._head))
        return other

    def forward_states(self, x: Activations, starts: Sequence[int], states: Sequence[int]) -> None:
        assert self._joined is not None
        self._joined.fill(quick_address(x), starts, states)
        self.pool.run(*self._layers_run)

    def set_lora(self, lora: ModelLora) -> None:
        self.decoder.set_lora(lora)

    def _run_blocks(
        self, x: Activations, start: int, token_args: int = 0, layers: Sequence[int] | None = None
    ) -> None:
        """The blocks of a long step, of all layers or of these; `on_hidden` is called after each feed-forward
        and MoE block.
        """
        for index in self.decoder.calls:
            if layers is not None and index.layer not in layers:
                continue
            if index.position == 0:
                self._kept.keep(index.layer, x)
            self.run_block(index, x, start, token_args)
            if self.on_hidden is not None and (rows := self.decoder.hidden_rows(index, len(x))):
                self.on_hidden(index.layer, *rows)

    def run_block(self, index: BlockIndex, x: Activations, start: int, token_args: int = 0) -> None:
        """x += the result of one block, for tokens at positions start…, whose cache pages are in the
        `PositionTable` at `token_args`, if any.
        """
        if self.state.slots is not None:
            fill_slots(self._step_args, self.state.begin(start, len(x)))
        if not token_args:
            self._touch_recent(start, len(x))
        rope = self._tables[index.layer].address_of(start, len(x))
        fill_step(self._step_args, quick_address(x), x.strides[0], len(x), start, rope, token_args)
        for call in self.decoder.calls[index]:
            self.pool.run(self._functions[call.kernel], call.block, self._step_address)

    def logits(self, x: Activations) -> npt.NDArray[np.float32]:
        whole = self._output.rows(len(x))
        fill_step(self._step_args, quick_address(x), x.strides[0], len(x), 0, 0)
        self.pool.run(self._functions["head_block"], self._head, self._step_address)
        return self._output.logits(whole)

    def final_norm(self, x: Activations) -> npt.NDArray[np.float32]:
        return final_norm(self.spec, self.weights, np.asarray(x)).astype(np.float32)

    def attention_scores(self, x: Activations, start: int) -> npt.NDArray[np.float64]:
        return attention_scores(self, x, start)

    def close(self) -> None:
        if self._owns_pool:
            self.pool.close()
        self.decoder.close()
