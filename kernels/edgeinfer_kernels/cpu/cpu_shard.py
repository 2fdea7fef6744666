"""The CPU shard of a split model: runs blocks on hidden states in an exchange buffer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.context_shift import forget
from edgeinfer_kernels.cpu.blocks import BlockBuilder
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.embedding import Embedding, Scratch
from edgeinfer_kernels.cpu.expert_blocks import ExpertBlockBuilder, GivenRouting, RoutingRows
from edgeinfer_kernels.cpu.layout.packed_matrix import (
    Arena,
    Bytes,
    address,
    byte_view,
    float_rows,
    int_fields,
    interleaved_bytes,
)
from edgeinfer_kernels.cpu.layout.repacking import OnPlaced, leave_in_file, repack
from edgeinfer_kernels.cpu.runtime.abi import CALL, EXPERTS, SERVICE
from edgeinfer_kernels.cpu.runtime.step_args import RopeTable, fill_call
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cpu.sparse import (
    SparseBuilder,
    SparseLayers,
    by_neuron,
    dense_layer,
    predictor_matrices,
)
from edgeinfer_kernels.expert_routing import PairCounts
from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.layer_split import Block, LayerSplit, host_feed_forward, turns_of
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_kernels.sizes.cpu_workspace import Workspace, group_offset
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.specification import (
    DecoderSpecification,
    ExpertsSpecification,
    FeedForwardSpecification,
)
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, FeedForwardWeights, Matrix


class ExchangeRows(NamedTuple):
    """Addresses of a MAILBOX and its payload: hidden states of `row_bytes` per token, the selected experts
    (int64) and their weights (float32); those of a token are contiguous.
    """

    mailbox: int
    rows: int
    row_bytes: int
    ids: int
    weights: int


class CpuShard:
    """The CPU's part of a decoder's layers under `divisions`, in the kernel layout, and the embedding.

    A step has at most `batch` tokens, whose hidden states are in the exchange buffer. For steps of more than
    `computed` tokens it has no stages (None: no limit). The weights of the blocks `in_file` stay
    memory-mapped, except the router and shared expert of an MoE layer. Memory-mapped weights cannot be
    streamed to a device, and neither can layers of `sparse`, whose part here reads only active neurons in
    short steps. `caches`: those of the layers whose attention is here. `kernels` are those of `kernel_units`
    with SERVICE.
    """

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        divisions: Sequence[LayerSplit],
        caches: Mapping[int, LayerCache],
        kernels: Kernels,
        mailbox: ExchangeRows,
        *,
        batch: int,
        threads: int,
        computed: int | None = None,
        in_file: Collection[Block] = (),
        sparse: SparseLayers | None = None,
        on_placed: OnPlaced | None = None,
    ) -> None:
        self.specification, self.weights, self.batch = specification, weights, batch
        self.turns = turns_of(weights, divisions)
        self._mailbox, self._kernels, self._arena = mailbox, kernels, Arena()
        self._divisions = list(divisions)
        self._second = self._feed_forwards()
        self._sparse = self._sparse_parts(sparse or {})
        self.team = ThreadPool(kernels, threads)
        sizes = ModelSizes.of(specification, weights)
        moved, mapped = self._matrices(in_file)
        placed = repack(moved, kernels, self._arena, threads, on_placed)
        self._memories = {
            matrix.place: byte_view(placed[id(matrix)].weights, interleaved_bytes(matrix)) for matrix in moved
        }
        placed |= leave_in_file(mapped, kernels, self._arena, group_offset(sizes))
        self.caches = dict(caches)
        self._computed = computed or batch
        workspace = Workspace(self._arena, sizes, self._computed, threads, repack=not mapped)
        scratch = Scratch(workspace.scratch, workspace.scratch_stride)
        self._embedding = Embedding(
            weights.token_embd, self._arena, kernels, self.team, scratch, specification.embedding_scale
        )
        self._builder = BlockBuilder(self._arena, workspace, placed, specification.width)
        self._x = float_rows(mailbox.rows, batch, mailbox.row_bytes // 4)
        self._chosen: list[int] = []
        self.asked = {
            layer: np.zeros(second.ffn_up_exps.experts, np.int64)
            for layer, second in self._second.items()
            if isinstance(second, ExpertWeights) and divisions[layer].changing
        }
        """Per layer with changing experts: request counts of each expert, on either device."""
        self._made_sparse = self._sparse_blocks()
        self._build(caches)

    def _feed_forwards(self) -> dict[int, FeedForwardWeights | ExpertWeights]:
        """The feed-forwards on the CPU, whole or in part."""
        found = {}
        for kind, layer in (block for turn in self.turns.host for block in turn):
            if kind == "feed_forward":
                w, division = self.weights.layers[layer], self._divisions[layer]
                found[layer] = host_feed_forward(w, division) if division.attention else w.feed_forward
        return found

    def _sparse_parts(self, layers: SparseLayers) -> SparseLayers:
        """The sparse layers that have a part on the CPU, with the predictors of that part."""
        found: dict[int, NeuronPredictor | None] = {}
        for layer in layers.keys() & self._second.keys():
            division, predictor = self._divisions[layer], layers[layer]
            first = division.neurons if division.attention else 0
            last = dense_layer(self.weights, layer).ffn_up.rows
            found[layer] = predictor and predictor.of_neurons(first, last)
        return found

    def _sparse_blocks(self) -> dict[int, int]:
        """The structures of the sparse layers."""
        if not self._sparse:
            return {}
        layers = enumerate(self.weights.layers)
        parts = (replace(w, feed_forward=self._second.get(i, w.feed_forward)) for i, w in layers)
        here, threads = replace(self.weights, layers=tuple(parts)), self.team.threads
        made = SparseBuilder(self._arena, self._kernels, self.specification, here, self._sparse, threads)
        dense = {layer: self._dense_block(layer) for layer in self._sparse}
        return made.blocks(dense, self._builder)

    def _dense_block(self, layer: int) -> int:
        facts, second = self.specification.layers[layer].feed_forward, self._second[layer]
        assert isinstance(facts, FeedForwardSpecification)
        assert isinstance(second, FeedForwardWeights)
        return self._builder.feed_forward(facts, second)

    def _matrices(self, in_file: Collection[Block]) -> tuple[list[Matrix], list[Matrix]]:
        """The matrices to repack, and those that stay memory-mapped."""
        sides: tuple[list[Matrix], list[Matrix]] = (predictor_matrices(self._sparse), [])
        for layer, second in self._second.items():
            here = not self._divisions[layer].attention
            if here:
                sides[Block("attention", layer) in in_file].extend(
                    self.weights.layers[layer].attention.matrices()
                )
            left = sides[Block("feed_forward", layer) in in_file]
            if isinstance(second, ExpertWeights):
                left.extend(second.stacks())
                sides[0].extend(second.every_token() if here else [])
            elif layer in self._sparse:
                mapped = by_neuron(second, self._sparse[layer])
                sides[1].extend(mapped)
                rows = set(map(id, mapped))
                sides[0].extend(matrix for matrix in second.matrices() if id(matrix) not in rows)
            else:
                left.extend(second.matrices())
        return sides

    def _build(self, caches: Mapping[int, LayerCache]) -> None:
        """Build one schedule of the blocks of all stages, and one for each stage."""
        ropes = [layer.attention.rope for layer in self.specification.layers]
        tables = {rope: RopeTable(rope) for rope in ropes}
        calls = {rope: np.zeros(len(CALL), np.int64) for rope in ropes}
        self._calls = [(tables[rope], calls[rope]) for rope in tables]
        self._steps = [
            [
                (*step, address(calls[ropes[block.layer]]))
                for block in turn
                for step in self._block(block, caches)
            ]
            for turn in self.turns.host
        ]
        served = []
        for turn, steps in enumerate(self._steps, 1):
            for place, step in enumerate(steps):
                awaited = turn if turn > 1 and place == 0 else 0
                served.append((*step, awaited, turn if place == len(steps) - 1 else 0))
        self._program = np.array(served, np.int64)
        service = self._arena.fill(SERVICE, mailbox=self._mailbox.mailbox, steps=len(served))
        self._serve = self._kernels.address("serve_device"), address(self._program), service

    def _block(self, block: Block, caches: Mapping[int, LayerCache]) -> list[tuple[int, int]]:
        """The kernels of a block and the structures that they read."""
        layer, w = block.layer, self.weights.layers[block.layer]
        facts, address_of = self.specification.layers[layer], self._kernels.address
        if block.kind == "feed_forward":
            name, made = self._feed_forward(layer, facts.feed_forward)
            return [(address_of(name), made)]
        attention = self._builder.attention(facts.attention, w.attention, caches[layer])
        found = [(address_of("attention_block"), attention)]
        second = facts.feed_forward
        if isinstance(second, ExpertsSpecification) and second.early:
            _, made = self._feed_forward(layer, second)
            found.insert(0, (address_of("route_block"), made))
        return found

    def _feed_forward(
        self, layer: int, facts: FeedForwardSpecification | ExpertsSpecification
    ) -> tuple[str, int]:
        second = self._second[layer]
        if layer in self._sparse:
            return "sparse_feed_forward_block", self._made_sparse[layer]
        if isinstance(second, FeedForwardWeights):
            return "feed_forward_block", self._dense_block(layer)
        assert isinstance(facts, ExpertsSpecification)
        experts, box = ExpertBlockBuilder(self._builder), self._mailbox
        if not self._divisions[layer].attention:
            return "experts_block", experts.experts(facts, second, None)
        given = GivenRouting(RoutingRows(box.ids, 8 * facts.used), box.weights)
        asked = self.asked[layer] if self._divisions[layer].changing else None
        self._chosen.append(experts.chosen_experts(facts, second, given, asked))
        return "chosen_experts_block", self._chosen[-1]

    def memory_of(self, matrix: Matrix) -> Bytes:
        """The bytes of a CPU matrix in the kernel layout."""
        return self._memories[matrix.place]

    def embed(self, ids: Sequence[int]) -> Activations:
        """Scaled embeddings of at most `batch` tokens, written to the exchange buffer."""
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        x = self._x[: len(ids), : self.specification.width]
        self._embedding.write(ids, x)
        return x

    def _fill_calls(self, tokens: int, start: int) -> None:
        if tokens > self._computed:
            raise ValueError(f"{tokens} tokens in one turn; the host was loaded for {self._computed}")
        box = self._mailbox
        for table, call in self._calls:
            fill_call(call, box.rows, box.row_bytes, tokens, start, table.address_of(start, tokens))

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """As `EvictingBackend.forget`, in the caches on the CPU."""
        for index, cache in self.caches.items():
            forget(cache, self.specification.layers[index].attention, gone, end)

    def serve(self, tokens: int, start: int) -> None:
        """Run all CPU stages of a step, each as soon as the device has reached it; return after the last."""
        self._fill_calls(tokens, start)
        self.team.run(*self._serve)

    def take_turn(self, turn: int, tokens: int, start: int) -> None:
        """Run one stage immediately, on the hidden states in the exchange buffer."""
        self._fill_calls(tokens, start)
        for function, block, call in self._steps[turn - 1]:
            self.team.run(function, block, call)

    @property
    def pairs(self) -> PairCounts:
        """Token-expert assignments of the layers with split experts."""
        fields = [int_fields(block, len(EXPERTS)) for block in self._chosen]
        seen, here = (sum(int(f[at // 8]) for f in fields) for at in (EXPERTS.pairs_seen, EXPERTS.pairs_here))
        return PairCounts(seen, here)

    def close(self) -> None:
        """Release threads and memory."""
        self.team.close()
        self._memories.clear()
        self._arena.clear()
