"""Dense feed-forward on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix, GatheredSpace
from edgeinfer_kernels.cuda.sparse.gathered import launch_add, launch_down, launch_gated, launch_sum
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_VECTOR_TOKENS
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "feed-forward"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceFeedForward:
    """A dense feed-forward, or its neurons on the device; vectors are None if they are not needed."""

    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    sub_norm: NextNorm | None = None
    """The norm of the rows that down reads."""
    gate_scale: float = 1.0
    up_scale: float = 1.0

    @property
    def neurons(self) -> int:
        """Elements of a hidden row."""
        return self.up.shapes.rows

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.up] if self.gate is None else [self.up, self.gate]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.down]


def take(
    builder: DeviceBuilder,
    spec: FeedForwardSpec | None,
    w: FeedForwardWeights,
    shards: Sequence[Shard] = (),
) -> DeviceFeedForward:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    rows = padded_rows(w.ffn_up.rows)
    has_bias = w.ffn_gate_bias is not None or w.ffn_up_bias is not None
    zeros = np.zeros(rows, np.float32)
    gate_bias = w.ffn_gate_bias if w.ffn_gate_bias is not None else zeros
    up_bias = w.ffn_up_bias if w.ffn_up_bias is not None else zeros
    return DeviceFeedForward(
        gate=None if w.ffn_gate is None else builder.matrix(w.ffn_gate),
        up=builder.matrix(w.ffn_up),
        down=builder.down(w.ffn_down),
        gate_bias=builder.vector(gate_bias, rows) if has_bias else None,
        up_bias=builder.vector(up_bias, rows) if has_bias else None,
        down_bias=builder.vector(w.ffn_down_bias),
        sub_norm=NextNorm.take_sub_norm(builder, spec.sub_norm, w.sub_norm)
        if spec and spec.sub_norm
        else None,
        gate_scale=w.gate_scale,
        up_scale=w.up_scale,
    )


def take_state(arena: Arena, spec: FeedForwardSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def has_granules(w: DeviceFeedForward) -> bool:
    """Whether the device has any neurons."""
    return w.neurons > 0


def inactive_bytes(w: DeviceFeedForward) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers for the hidden rows of a decode step, shared by all feed-forwards.

    The padding of rows must stay zero, so rows of whole groups of neurons and others don't share a buffer.
    `projected`: the products of up and gate, of blocks whose hidden rows have a norm.
    """

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        neurons = [block.weights.neurons for block in blocks]
        padded = max((count for count in neurons if count % NEURON_GROUP), default=0)
        self._padded = take_activations(arena, step.tokens, padded, step.hidden_floats)
        self._whole = take_activations(arena, step.tokens, max(neurons), step.hidden_floats)
        normed = [block.weights.inputs for block in blocks if block.weights.sub_norm is not None]
        floats = max((sum(m.shapes.padded_rows for m in inputs) for inputs in normed), default=0)
        self.projected = arena.take((step.tokens, floats), torch.float32)

    def hidden(self, w: DeviceFeedForward) -> Activations:
        """The buffer for the hidden rows of a feed-forward, or of its part on the device."""
        buffer = self._padded if w.neurons % NEURON_GROUP else self._whole
        return buffer.of_blocks(w.down.shapes.blocks)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """Gate and up, then down. If the CPU has some of the neurons, both parts run in parallel."""
    w, spec = block.weights, block.residual.block
    if stage:
        step.send(stage, tokens)
        if not w.neurons:
            return step.receive(stage, None, 0.0, number, tokens)
    hidden = step.space("feed_forward").hidden(w)
    if isinstance(w.down, ColumnMatrix):
        return _gather(step, number, block, source, hidden, tokens, stage)
    _project(step, spec, w, source, hidden, tokens)
    if not stage:
        return step.close_block(number, w.down, w.down_bias, hidden, "down", tokens)
    y = step.workspace.y
    step.launches.rows((w.down,), Source(hidden, source.sum_squares), y, w.down_bias, "down", tokens)
    return step.receive(stage, y, block.residual.residual_scale, number, tokens)


def _gather(
    step: "DecodeStep",
    number: int,
    block: DeviceBlock,
    source: Source,
    hidden: Activations,
    tokens: int,
    stage: int,
) -> Source:
    """As `decode`, with the weights of active neurons only."""
    w, residual, launches = block.weights, block.residual, step.launches
    target, norm, post = step.target(number), step.norm_after(number), block.norms.post_norm
    is_closed = not stage and post is None and norm.folds
    x, y, scale = step.workspace.x, step.workspace.y, residual.residual_scale
    for first in range(0, tokens, MAX_VECTOR_TOKENS):
        count, own = min(MAX_VECTOR_TOKENS, tokens - first), hidden.after(first)
        space, segments = _list_active(step, block, source.after(first), own, count)
        if is_closed:
            to = target.after(first)
            launch_add(launches, space, segments, w.down_bias, scale, norm, x[first:], to, count)
        else:
            launch_sum(launches, space, segments, y[first:], w.down_bias, count)
    if is_closed:
        if norm.weight is not None:
            target.norm = norm.spec
        return target
    if stage:
        return step.receive(stage, y, scale, number, tokens)
    return step.add(number, y, scale, tokens)


def _list_active(
    step: "DecodeStep", block: DeviceBlock, source: Source, hidden: Activations, tokens: int
) -> tuple[GatheredSpace, int]:
    """The hidden rows of some tokens, and the sums of their active neurons' columns by segment."""
    w, space = block.weights, step.workspace.gathered
    assert space is not None
    launch_gated(step.launches, block.residual.block.activation, w, source, hidden, tokens)
    return space, launch_down(step.launches, w.down, hidden, space, tokens)


def _project(
    step: "DecodeStep",
    spec: FeedForwardSpec,
    w: DeviceFeedForward,
    source: Source,
    hidden: Activations,
    tokens: int,
) -> None:
    """The hidden rows."""
    launches = step.launches
    if w.sub_norm is None:
        launches.gated(spec.activation, w, source, hidden, tokens)
        return
    rows = step.space("feed_forward").projected
    launches.rows(tuple(w.inputs), source, rows, None, "qkv", tokens)
    launches.norms.activation_norm(spec.activation, w, w.sub_norm, rows, hidden, tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the parts of a feed-forward in sequence, including the CPU stage if it has one."""
    spec, stage, parts = block.residual.block, chunk.parallel_stage(number), block.parts
    if stage:
        stage.send(chunk.x)
    if prompt.products.kept:
        prompt.products.kept.clear()  # of a shared expert
    for part in parts[:-1]:
        y, scales = prompt.products.dense(spec.activation, part, chunk.h)
        prompt.add_part(chunk, number, y, scales, part.down_bias)
    if parts:
        last = parts[-1]
        inner = prompt.products.hidden_of(spec.activation, last, chunk.h)
        y = prompt.result(inner.rows, inner.scales, last.down, last.down_bias)
    prompt.report_hidden(block.index.layer)
    if stage:
        stage.receive(chunk.x, chunk.start)
    if parts:
        prompt.add(chunk, number, y, last.down_bias, inner.scales)
    else:
        prompt.apply_next_norm(chunk, number)
