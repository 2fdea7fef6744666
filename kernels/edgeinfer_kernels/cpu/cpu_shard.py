"""The CPU shard of a split model: runs blocks on hidden states in an exchange buffer."""

import time
from collections.abc import Collection, Mapping, Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, BatchPositions, ExpertCounts
from edgeinfer_kernels.blocks.common.block import BlockState
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.block_builder import BlockOptions, Counts, RoutingRows
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.decoder import CpuDecoder, WeightPlacement
from edgeinfer_kernels.cpu.layout.neuron_layout import MemoryOrder
from edgeinfer_kernels.cpu.layout.packed_matrix import address, byte_view, float_rows, interleaved_bytes
from edgeinfer_kernels.cpu.layout.repacking import OnLoaded
from edgeinfer_kernels.cpu.runtime.experts_args import ExpertsArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import (
    EXCHANGE_WORDS,
    SENT,
    ServedStep,
    ServiceArgs,
    StepArgs,
)
from edgeinfer_kernels.cpu.runtime.schedule import PositionTable, RopeTable, Run, fill_slots, fill_step
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.lora.shards import shard_lora
from edgeinfer_kernels.lora.weights import ModelLora
from edgeinfer_kernels.matrix import Matrix, MemoryKey
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_kernels.pages import Bytes
from edgeinfer_kernels.recurrent_state import StateSlots
from edgeinfer_kernels.stages import CPU, Stage, part_of_block, shards_on, stage_blocks


class ExchangeRows(NamedTuple):
    """Addresses of ExchangeWords and their payload: hidden states of `row_bytes` per token, the selected
    experts (int64) and their weights (float32); those of a token are contiguous.
    """

    exchange_buffer: int
    rows: int
    row_bytes: int
    ids: int
    weights: int


@dataclass(frozen=True)
class ShardOptions:
    """How the CPU shard is loaded.

    A step has at most `batch` tokens. For steps of more than `computed` tokens there are no stages (None: no
    limit). The weights of the blocks `in_file` stay memory-mapped, except the router and shared expert of an
    MoE block; they cannot be streamed to a device. The layers of `sparse` read only active neurons of their
    part here in short steps.
    """

    batch: int
    threads: int
    computed: int | None = None
    in_file: Collection[BlockIndex] = ()
    sparse: SparseLayers = field(default_factory=dict)


class CpuShard:
    """The CPU's shards in the `stages` of a decoder, in the kernel layout, and the embedding.

    The hidden states of a step are in the exchange buffer. `state`: that of the layers on the CPU. `kernels`
    are those of `kernel_units` with SERVICE.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        stages: Sequence[Stage],
        state: DecoderState,
        kernels: Kernels,
        exchange_buffer: ExchangeRows,
        options: ShardOptions,
        on_loaded: OnLoaded | None = None,
    ) -> None:
        self.spec, self.state, self.batch, self._weights = spec, state, options.batch, weights
        self.stages, self._shards = stage_blocks(spec, CPU, stages), shards_on(CPU, stages)
        self._exchange_buffer, self._kernels = exchange_buffer, kernels
        self._computed = options.computed or self.batch
        self._placed: PositionTable | None = None
        self._placed_at = 0, 0
        """The first position of a placed step, and the number of positions up to its last one."""
        self._before: npt.NDArray[np.int64] | None = None
        """Of a tree, for each token the one before it."""
        self._parts = {
            index: part_of_block(weights.residual(index), self._shards[index.layer])
            for index in chain.from_iterable(self.stages)
        }
        sparse = self._sparse_parts(options.sparse)
        self.pool = ThreadPool(kernels, options.threads)
        placement = WeightPlacement(*self._matrices(options.in_file), sparse, on_loaded)
        self.decoder = CpuDecoder(
            spec, weights, self._parts, state, kernels, self.pool, self._computed, placement
        )
        self._arena = self.decoder.arena
        self._memories = self._repacked_memories()
        self._x = float_rows(exchange_buffer.rows, self.batch, exchange_buffer.row_bytes // 4)
        self.requests = self._request_counts()
        """Per layer with an expert cache: request counts of each expert, on either device."""
        self._build()

    def _repacked_memories(self) -> dict[MemoryKey, tuple[Bytes, MemoryOrder]]:
        packed, found = self.decoder.packed, dict[MemoryKey, tuple[Bytes, MemoryOrder]]()
        for matrix in self.decoder.repacked:
            memory = byte_view(packed[id(matrix)].weights, interleaved_bytes(matrix))
            found[matrix.memory_key] = memory, "groups"
        return found | self.decoder.memories_by_neuron

    def _request_counts(self) -> dict[int, Counts]:
        return {
            index.layer: np.zeros(part.block.ffn_up_exps.experts, np.int64)
            for index, part in self._parts.items()
            if self._shards[index.layer].holds_all
        }

    @property
    def states(self) -> Mapping[BlockIndex, BlockState]:
        """The states of the blocks here."""
        return self.state.blocks

    @property
    def slots(self) -> StateSlots | None:
        """The slots of recurrent states; None: there is none here."""
        return self.state.slots

    def _sparse_parts(self, layers: SparseLayers) -> SparseLayers:
        """The sparse layers that have a part on the CPU, with the predictors of that part."""
        found: dict[int, NeuronPredictor | None] = {}
        for layer in layers.keys() & self._shards.keys():
            neurons, predictor = self._shards[layer].neurons, layers[layer]
            found[layer] = predictor and predictor.of_neurons(neurons.start, neurons.stop)
        return found

    def _matrices(self, in_file: Collection[BlockIndex]) -> tuple[list[Matrix], list[Matrix]]:
        """The matrices that the kernels multiply, and those of them that stay memory-mapped."""
        multiplied, mapped = list[Matrix](), list[Matrix]()
        for index, part in self._parts.items():
            granules = part.block.granule_matrices()
            multiplied += part.block.matrices() if self._shards[index.layer].undivided else granules
            mapped += granules if index in in_file else []
        return multiplied, mapped

    def _build(self) -> None:
        """Build one schedule of the kernels of all stages, and one for each stage."""
        self.decoder.build(self._options)
        self.decoder.give_own_rows()
        calls, ropes = self.decoder.calls, self.decoder.ropes
        self._selected = [calls[index][0].block for index in calls if self._options(index).expert_weights]
        found = dict.fromkeys(ropes.get(index.layer) for index in calls)
        tables = {rope: (RopeTable(rope), StepArgs()) for rope in found}
        self._step_args = list(tables.values())
        if self.state.recent is not None:
            for _, args in self._step_args:
                args.recent = address(self.state.recent.table)
        self.steps: list[list[tuple[BlockIndex, Run]]] = []
        """The runs of each stage, with their blocks."""
        served = []
        for number, stage in enumerate(self.stages, 1):
            kernels = [(index, kernel) for index in stage for kernel in calls[index]]
            steps = list[tuple[BlockIndex, Run]]()
            for position, (index, kernel) in enumerate(kernels):
                step_args = addressof(tables[ropes.get(index.layer)][1])
                run = self._kernels.address(kernel.kernel), kernel.block, step_args
                steps.append((index, run))
                awaited = number if number > 1 and position == 0 else 0
                completed = number if position == len(kernels) - 1 else 0
                served.append((*run, int(not kernel.ends_by_token), awaited, completed))
            self.steps.append(steps)
        schedule = self._arena.fill_all(ServedStep, [ServedStep(*step) for step in served])
        service = self._arena.fill(
            ServiceArgs, words=self._exchange_buffer.exchange_buffer, steps=len(served)
        )
        self._serve = self._kernels.address("serve_device"), schedule, service

    def _options(self, index: BlockIndex) -> BlockOptions:
        """For an MoE block whose router is on the GPU: where the selected experts are written."""
        block = self.spec.residual(index).block
        if not isinstance(block, MoeSpec) or self._shards[index.layer].undivided:
            return BlockOptions()
        box = self._exchange_buffer
        routing = RoutingRows(box.ids, 8 * block.experts_per_token)
        return BlockOptions(routing, box.weights, self.requests.get(index.layer))

    def set_lora(self, lora: ModelLora) -> None:
        """Use the parts of these adapters that are here, and that of the embedding. Raises `LoraError`."""
        blocks = [
            (self._weights.residual(index).block, part.block, self._shards[index.layer])
            for index, part in self._parts.items()
        ]
        self.decoder.set_lora(replace(shard_lora(lora, blocks), embedding=lora.embedding))

    def memory_of(self, matrix: Matrix) -> Bytes:
        """The bytes of a CPU matrix in the kernel layout."""
        return self._memories[matrix.memory_key][0]

    def order_of(self, matrix: Matrix) -> MemoryOrder:
        """How a CPU matrix is stored."""
        return self._memories[matrix.memory_key][1]

    def embed(self, ids: Sequence[int]) -> Activations:
        """Scaled embeddings of at most `batch` tokens, written to the exchange buffer."""
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        x = self._x[: len(ids), : self.spec.hidden_size]
        self.decoder.embedding.write(ids, x)
        return x

    @property
    def computed(self) -> int:
        """Maximum tokens of a step with stages."""
        return self._computed

    @property
    def have_pages(self) -> bool:
        """Whether several sequences can have pages in the caches here."""
        caches = [getattr(state, "cache", None) for state in self.state.blocks.values()]
        return all(cache is not None and cache.ring == cache.positions for cache in caches)

    def place(self, positions: BatchPositions | None, parents: Sequence[int] = ()) -> None:
        """The following steps have tokens at these positions of sequences in pages; None: of one text.
        `parents`: as `Backend.forward_tree`.
        """
        self._before = np.array([-1, *(parent + 1 for parent in parents)], np.int64) if parents else None
        self._placed = None
        if positions is not None:
            recent = self.state.recent
            near = None if recent is None else recent.touch_batch(positions.positions, positions.pages)
            self._placed = PositionTable(positions, near)
            first, last = int(positions.positions.min()), int(positions.positions.max())
            self._placed_at = first, last + 1 - first

    def begin_step(self, tokens: int, start: int) -> None:
        """Fill the arguments of the runs of a step."""
        if tokens > self._computed:
            raise ValueError(f"{tokens} tokens in one stage; the host was loaded for {self._computed}")
        box, count, token_args = self._exchange_buffer, tokens, 0
        if self._placed is not None:
            (start, count), token_args = self._placed_at, self._placed.address
        elif self.state.recent is not None:
            self.state.recent.touch(start, tokens)
        for table, step_args in self._step_args:
            rope = table.address_of(start, count)
            fill_step(step_args, box.rows, box.row_bytes, tokens, start, rope, token_args)
            if self.state.slots is not None:
                self._fill_slots(step_args, self.state.slots, tokens, start)

    def _fill_slots(self, step_args: StepArgs, slots: StateSlots, tokens: int, start: int) -> None:
        if self._before is None:
            fill_slots(step_args, slots.begin(start, tokens))
        else:
            fill_slots(step_args, slots.begin_tree(start, tokens), address(self._before))

    def serve(self, tokens: int, start: int) -> None:
        """Run all CPU stages of a step, each as soon as the device has reached it; return after the last."""
        self.begin_step(tokens, start)
        self.pool.run(*self._serve)

    def seconds_alone(self) -> float:
        """Seconds of all CPU stages of a token at the first position, without a device to wait for; it
        overwrites that position.
        """
        words = (c_int64 * EXCHANGE_WORDS).from_address(self._exchange_buffer.exchange_buffer)
        words[SENT] = len(self.stages)
        begin = time.perf_counter()
        self.serve(1, 0)
        return time.perf_counter() - begin

    def run_stage(self, stage: int, tokens: int, start: int) -> None:
        """Run one stage immediately, on the hidden states in the exchange buffer."""
        self.begin_step(tokens, start)
        for _, run in self.steps[stage - 1]:
            self.pool.run(*run)

    @property
    def expert_counts(self) -> ExpertCounts:
        """Token-expert assignments of the layers with split experts."""
        found = [ExpertsArgs.from_address(block) for block in self._selected]
        return ExpertCounts(
            sum(args.assignments_seen for args in found), sum(args.assignments_here for args in found)
        )

    def close(self) -> None:
        """Release threads and memory."""
        self.pool.close()
        self._memories.clear()
        self.decoder.close()
