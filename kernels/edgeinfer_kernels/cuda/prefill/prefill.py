"""Prefill: chunks of tokens through float16 matmul with dequantized weights.

Every matrix is dequantized, slice by slice, into a scratch buffer that the library matmul reads. For hundreds
of tokens this is faster than matmul with packed weights. Activations are float16 with a scale per row to
avoid overflow; sums and hidden states are float32.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from edgeinfer_kernels.backend import OnHidden
from edgeinfer_kernels.cuda.blocks import device_module, normalizes_input
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.states.keeping import keep_chunk
from edgeinfer_kernels.cuda.draft.states.state_ring import StateRing
from edgeinfer_kernels.cuda.lora import embedding_args
from edgeinfer_kernels.cuda.offload.cpu_stages import PrefillExchange, PromptStage
from edgeinfer_kernels.cuda.offload.streamed_layers import StreamedLayers
from edgeinfer_kernels.cuda.prefill.captured_chunks import CapturedChunks
from edgeinfer_kernels.cuda.prefill.prefill_experts import PrefillExperts
from edgeinfer_kernels.cuda.prefill.prefill_matmul import Products
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, add_norm_rows, norm_rows
from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock, device_blocks
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix
from edgeinfer_kernels.cuda.tensor.chunk_sums import ChunkSums
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embed_rows_kernel
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.per_layer_rows import PerLayerRows
from edgeinfer_kernels.recurrent_state import RecurrentState, RecurrentStep
from edgeinfer_kernels.sizes.cuda_buffers import SEQUENCES_AT, STATE_WORDS, STATES_AT
from edgeinfer_kernels.sizes.model_sizes import ModelSizes


@dataclass(frozen=True)
class Chunk:
    """State of a chunk of tokens: hidden states, normed hidden states, first position, and the blocks.

    `own`: the normed hidden states of a block that shares x with another one, but not the norm.
    `words`: what kernels read of it on the device, as `chunk_words`. A captured chunk is replayed with other
    words, so no kernel may get its first position, or what follows from it, from the host.
    `pages`: those of its sequence; None: the cache has one text.
    """

    x: Tensor
    h: ScaledRows
    own: ScaledRows
    start: int
    words: Tensor
    blocks: Sequence[PromptBlock]
    exchange: PrefillExchange | None
    pages: Tensor | None = None
    is_streamed: bool = False
    """Whether the blocks are those of the whole decoder, of which the CPU's weights are streamed."""

    def parallel_stage(self, number: int) -> PromptStage | None:
        """The CPU stage that runs in parallel with a block."""
        stage = self.exchange.stages.parallel[number] if self.exchange else 0
        return PromptStage(self.exchange, stage) if self.exchange and stage else None


OBSERVED_EVERY = 8
"""Streamed chunks of which one is observed: the host waits for its rows in every layer."""


def chunk_words(
    start: int, tokens: int, step: RecurrentStep | None = None, sequence: DeviceSequence | None = None
) -> Tensor:
    """(STATE_WORDS,) int32: what kernels read of a chunk, in the places of a decode step's words: of a
    `sequence`, or with the slots of `step`.
    """
    words = torch.zeros(STATE_WORDS, dtype=torch.int32)
    of_sequence: tuple[int, ...] = (start, *(step or RecurrentStep()), tokens)
    if sequence is not None:
        of_sequence = sequence.words(start, tokens)
        words[STATES_AT] = sequence.states_at
    words[SEQUENCES_AT : SEQUENCES_AT + len(of_sequence)] = torch.tensor(of_sequence, dtype=torch.int32)
    return words


class Prefill:
    """Evaluates chunks of at most `chunk` tokens through the blocks; the buffers come from the arena."""

    def __init__(
        self, model: DeviceModel, arena: Arena, chunk: int, capability: int, sizes: ModelSizes
    ) -> None:
        """`sizes`: of the whole decoder, of which `model` may be a part."""
        self.model = model
        self.sent: StreamedLayers | None = None
        """All blocks, if the CPU's weights can be streamed."""
        self.on_hidden: OnHidden | None = None
        """Called in some of the chunks whose weights are streamed, with some of the hidden rows."""
        self._streamed_chunks = 0
        self.exchange: PrefillExchange | None = None
        """The CPU stages of a split model."""
        self.collective: Collective | None = None
        """Of a rank of tensor parallel."""
        self.sums: ChunkSums | None = None
        """Those of the collective for blocks of a chunk; None: it adds up a whole result."""
        self.kept: StateRing | None = None
        """The states of the last positions, for a draft head."""
        self.chunk = chunk
        self.capability = capability
        spec = model.spec
        self.ids = arena.take((chunk,), torch.int32)
        self.x = arena.take((chunk, spec.hidden_size), torch.float32)
        self._h = arena.take((chunk * spec.hidden_size,), torch.float16)
        own = chunk * any(block.has_own_norm for block in sizes.blocks)
        self._own = arena.take((own * spec.hidden_size,), torch.float16)
        self._own_scales = arena.take((own,), torch.float32)
        self._spaces: dict[str, Any] = {}
        for blocks in sizes.by_kind().values():
            specs = [block.spec for block in blocks if hasattr(block, "spec")]
            make = getattr(device_module(specs[0].kind), "PromptSpace", None) if specs else None
            if make is not None:
                self._spaces[specs[0].kind] = make(specs, arena, chunk)
        self._words = arena.take((STATE_WORDS,), torch.int32)
        self._fetched_words = arena.take((STATE_WORDS * sizes.is_recurrent,), torch.int32)
        """Those for states that were fetched from the host."""
        self.sequence: DeviceSequence | None = None
        """The sequence of the next chunks."""
        self._h_scales = arena.take((chunk,), torch.float32)
        self._ones = arena.take((chunk,), torch.float32)
        self.products = Products(sizes, arena, chunk)
        self.products.lora = model.lora
        self.experts = PrefillExperts(spec, self.products, arena, capability)
        self._blocks = device_blocks(model)
        self.per_layer = PerLayerRows(model.per_layer, self._spaces.values(), self.ids.device)
        self._can_capture = self.ids.is_cuda and not spec.is_encoder
        self.forget()

    def forget(self) -> None:
        """Capture chunks again from now on, because the LoRA adapters have changed."""
        self._captured = CapturedChunks(self.ids.device) if self._can_capture else None

    def keep_layers(self, layers: Collection[int]) -> None:
        """Evaluate only the blocks of these layers from now on."""
        self._blocks = [block for block in self._blocks if block.index.layer in layers]

    def space(self, kind: str) -> Any:
        """The buffers of a block kind."""
        return self._spaces[kind]

    def read_texts(self, lengths: Sequence[int]) -> Tensor:
        """Evaluate `ids` of an encoder, those of texts of these lengths; return x as `read`."""
        self.space("encoder_attention").send(lengths)
        return self.read(sum(lengths), 0)

    def read(self, tokens: int, start: int, pages: Tensor | None = None) -> Tensor:
        """Evaluate the first `tokens` of `ids` at positions start…, in these `pages` of the cache if given;
        return x (tokens, hidden_size) after the last block.

        In a split model the first hidden states come from the host. It then runs its CPU stages, or its
        weights are streamed to the GPU if there are enough tokens.
        """
        x = self.x[:tokens]
        sent = self.sent if self.sent and tokens >= self.sent.min_tokens else None
        if sent and pages is not None and sent.host_states:  # a state is fetched as one text
            sent = None
        exchange = None if sent else self.exchange
        h = ScaledRows(self._h[: x.numel()].view(x.shape), self._h_scales[:tokens])
        blocks = sent.blocks if sent else self._blocks
        own = ScaledRows(self._own[: x.numel()].view(-1, x.shape[1]), self._own_scales[:tokens])
        chunk = Chunk(x, h, own, start, self._words, blocks, exchange, pages, sent is not None)
        self.products.kept = None
        if sent:
            sent.sender.begin()
            if self.on_hidden is not None and self._streamed_chunks % OBSERVED_EVERY == 0:
                self.products.kept = []
            self._streamed_chunks += 1
        if exchange is not None:
            exchange.receive(1, x, start)
        elif self.exchange is not None:
            self.exchange.fetch(x)
        self._fill_words(tokens, start, sent)
        if self._captured and self.exchange is None and not self._waits_for_host(chunk):
            self._captured.run((tokens, pages is not None), partial(self._launch, chunk))
        else:
            self._launch(chunk)
        return x

    def report_hidden(self, layer: int) -> None:
        """Report the rows that the parts of a layer's feed-forward have kept, in the order of the file."""
        kept = self.products.kept
        if kept and self.on_hidden is not None:
            self.on_hidden(layer, torch.cat(kept, 1).float().numpy(), None)
            kept.clear()

    def _waits_for_host(self, chunk: Chunk) -> bool:
        """Whether the host takes part in a block of the chunk."""
        return any(
            block.module.waits_for_host(self, chunk, block)
            for block in chunk.blocks
            if hasattr(block.module, "waits_for_host")
        )

    def _launch(self, chunk: Chunk) -> None:
        """Launch the kernels of a chunk; in a split model, with the exchanges between them."""
        x, exchange, layers = chunk.x, chunk.exchange, self.model.layers
        self._ones.fill_(1.0)
        if self.sums is not None:
            self.sums.begin()
        if self.exchange is None:
            self._embed(x)
        self.apply_next_norm(chunk, -1)
        for number, block in enumerate(chunk.blocks):
            if block.index.position == 0:
                self._keep(chunk, block.index.layer if chunk.is_streamed else layers[block.index.layer])
                self._before_layer(chunk, number)
            self._apply_own_norm(chunk, number + 1)
            block.module.prefill(self, chunk, number, block)
            stage = exchange.stages.after[number] if exchange else 0
            if exchange and stage:
                exchange.send(x)
                exchange.receive(stage, x, chunk.start)
                self.apply_next_norm(chunk, number)
        self._keep(chunk, self.model.layer_count)

    def _keep(self, chunk: Chunk, layers: int) -> None:
        """Keep the states after this number of layers, if a draft head reads those."""
        if self.kept is not None:
            keep_chunk(self.model, self.kept, layers, chunk.x, chunk.words)

    def _fill_words(self, tokens: int, start: int, sent: StreamedLayers | None) -> None:
        """Set the words of a chunk, and those for states that are fetched from the host."""
        self._words.copy_(chunk_words(start, tokens, sequence=self.sequence))
        if sent and sent.host_slots is not None:
            fetched = RecurrentStep(sent.host_slots.begin(start, tokens).pending, 0, 1)
            self._fetched_words.copy_(chunk_words(start, tokens, fetched))

    def recurrent_state(self, chunk: Chunk, block: PromptBlock) -> tuple[RecurrentState, Tensor]:
        """A block's state on the device, fetched from the host if it is there, and the step's words."""
        if block.state is not None:
            return block.state, chunk.words
        states = self.host_states(block.residual.block.kind)
        return states.fetch(block.index, chunk.start, len(chunk.x)), self._fetched_words

    def put_back_state(self, chunk: Chunk, block: PromptBlock, state: RecurrentState) -> None:
        """Copy a fetched state to the host after the chunk."""
        if block.state is None:
            states = self.host_states(block.residual.block.kind)
            states.put_back(block.index, state, chunk.start, len(chunk.x))

    def _before_layer(self, chunk: Chunk, number: int) -> None:
        """Run what the blocks of a layer, whose first is block `number`, run before it."""
        layer = chunk.blocks[number].index.layer
        for block in takewhile(lambda each: each.index.layer == layer, islice(chunk.blocks, number, None)):
            if hasattr(block.module, "before_layer_prefill"):
                block.module.before_layer_prefill(self, chunk, block)

    def _apply_own_norm(self, chunk: Chunk, number: int) -> None:
        """Apply to x the norm of block `number`, if it shares x with another one, but not the norm."""
        if number < len(chunk.blocks) and chunk.blocks[number].residual.has_own_norm:
            norm, norms = chunk.blocks[number].residual.norm, chunk.blocks[number].norms
            norm_rows(chunk.x, norm, norms.norm, norms.norm_bias, chunk.own.rows, chunk.own.scales)

    def apply_next_norm(self, chunk: Chunk, number: int) -> None:
        """Apply to x the norm after block `number`."""
        norm, is_applied = self._norm_after(chunk, number)
        if is_applied:
            norm_rows(chunk.x, norm.spec, norm.weight, norm.bias, chunk.h.rows, chunk.h.scales)

    def _embed(self, x: Tensor) -> None:
        spec, embedding = self.model.spec, self.model.embedding
        parts, tile = embedding_args(embedding, self.model.embedding_lora)
        embed_rows_kernel[(-(-spec.hidden_size // 256), len(x))](
            parts,
            self.ids,
            x,
            spec.embedding_scale,
            WIDTH=spec.hidden_size,
            BLOCKS=embedding.shapes.blocks,
            TILE=tile,
        )
        if self.model.position_rows is not None:
            self.space("encoder_attention").add_position_rows(x, self.model.position_rows)

    def add(
        self, chunk: Chunk, number: int, y: Tensor, bias: Tensor | None, scales: Tensor | None = None
    ) -> None:
        """x += residual_scale · post_norm(scales · y + bias) of block `number`; then the next norm."""
        if self.collective is not None:
            self._finish_sum(self.collective, y, bias, scales)
            bias = scales = None
        block, (norm, is_applied) = chunk.blocks[number], self._norm_after(chunk, number)
        rows = ScaledRows(y, self._ones[: len(chunk.x)] if scales is None else scales)
        post_norm = NextNorm.of_result(block.residual, block.norms)
        scale, out = block.residual.residual_scale, chunk.h if is_applied else None
        add_norm_rows(chunk.x, rows, bias, post_norm, scale, norm, out)

    def result(
        self, rows: Tensor, scales: Tensor | None, matrix: DeviceMatrix, bias: Tensor | None
    ) -> Tensor:
        """The product of rows and a matrix that ends a block, for `add` with these scales and bias.

        With tensor parallel its columns are added up over the ranks while the next ones are computed.
        """
        if self.sums is None or isinstance(matrix, ColumnMatrix):
            return self.products.product(rows, matrix)
        tokens = len(rows)
        total = self.products.floats(tokens, matrix.shapes.rows)
        own = self.sums.rows(tokens, scales if bias is None else None)
        at_once = self.sums.columns_at_once(tokens)
        for first, count in self.products.by_columns(rows, matrix, own, at_once):
            if bias is not None:
                _apply(own[:, first : first + count], bias[first : first + count], scales)
            self.sums.add_up(first, count, total)
        return total

    def _finish_sum(
        self, collective: Collective, y: Tensor, bias: Tensor | None, scales: Tensor | None
    ) -> None:
        """y = Σ scales · y + bias over the ranks, whose scales differ; the bias is that of one of them. The
        sum of a `result` has begun.
        """
        if self.sums is None:
            _apply(y, bias, scales)
            collective.add_up(y)
            return
        if not self.sums.has_begun(y):
            own = self.sums.rows(len(y), None)
            _apply(own.copy_(y), bias, scales)
            self.sums.add_up(0, y.shape[1], y)
        self.sums.finish()

    def add_part(self, chunk: Chunk, number: int, y: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """x += residual_scale · (scales · y + bias) of a part of block `number`."""
        residual = chunk.blocks[number].residual
        no_norm = NextNorm(residual.norm, None, None)
        rows = ScaledRows(y, scales)
        add_norm_rows(chunk.x, rows, bias, no_norm, residual.residual_scale, no_norm, None)

    def host_states(self, kind: str) -> Any:
        """The states on the host of a block kind, which streamed blocks read."""
        assert self.sent is not None, "only streamed blocks have their state on the host"
        return self.sent.host_states[kind]

    def _norm_after(self, chunk: Chunk, number: int) -> tuple[NextNorm, bool]:
        """The norm after block `number`, and whether there is one: none follows the last block, or precedes
        one that shares its input or normalizes it.
        """
        if number + 1 == len(chunk.blocks):
            return NextNorm(self.model.spec.norm, None, None), False
        block = chunk.blocks[number + 1]
        if block.residual.shares_input or normalizes_input(block.residual.block.kind):
            return NextNorm(block.residual.norm, None, None), False
        return NextNorm(block.residual.norm, block.norms.norm, block.norms.norm_bias), True


def _apply(y: Tensor, bias: Tensor | None, scales: Tensor | None) -> None:
    """y = scales · y + bias."""
    if scales is not None:
        y *= scales[:, None]
    if bias is not None:
        y += bias[: y.shape[1]]
