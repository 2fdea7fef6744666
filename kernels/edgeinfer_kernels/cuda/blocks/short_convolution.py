"""Short convolution on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.short_convolution import ShortConvolutionSpec, ShortConvolutionWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    DeviceConvolution,
    add_product,
    project_back,
    take_stack,
    take_vectors,
)
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    inactive_bytes as inactive_bytes,
)
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    take_state as take_state,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates as HostStates,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    keep_chunk_rows,
    keep_step_rows,
    state_args,
    state_config,
    step_config,
)
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.recurrent.short_convolution import (
    chunk_convolution_kernel,
    product_rows_kernel,
    step_convolution_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "short convolution"
"""The name of the weights in lists of device memory."""
STEP_CHANNELS = 256
"""Channels of a program of a decode step."""
CHUNK_CHANNELS = 2048
"""Channels that a program of a chunk processes at a time."""


def take(
    builder: DeviceBuilder,
    spec: ShortConvolutionSpec,
    w: ShortConvolutionWeights,
    shards: Sequence[Shard] = (),
) -> DeviceConvolution:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    stack = take_stack(builder, w.b, w.c, w.x)
    return DeviceConvolution(stack, builder.matrix(w.output), *take_vectors(builder, w.taps))


class Space:
    """The buffers of a decode step, shared by all short convolutions."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceConvolution] = [block.weights for block in blocks]
        channels = max(block.residual.block.channels for block in blocks)
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, channels, outputs)
        self.bcx = arena.take((step.tokens, max(w.projections.rows for w in weights)), torch.float32)
        self.flat = arena.take((step.tokens, channels), torch.float32)
        self.rows = arena.take((step.tokens, padded(channels)), torch.float32)


class PromptSpace:
    """The rows of the tokens of a chunk, for all short convolutions."""

    def __init__(self, specs: Sequence[ShortConvolutionSpec], arena: Arena, chunk: int) -> None:
        self.rows = arena.take((chunk * max(spec.recurrent.row_width for spec in specs),), torch.float32)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The three projections, then the convolution, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("short_convolution")
    step.launches.stacked(w.projections, source, space.bcx, None, tokens)
    c_at, x_at = w.projections.begins([spec.channels] * 3, padded=True)[1:]
    shape, state, words = spec.recurrent, state_args(block.state), step.workspace.state
    config, pieces = step_config(step, shape), -(-spec.channels // STEP_CHANNELS)
    step.launches.launch(
        product_rows_kernel,
        (tokens, pieces),
        space.bcx,
        space.bcx,
        space.bcx.shape[1],
        space.rows,
        WIDTH=spec.channels,
        ROW=shape.row_width,
        BLOCK=STEP_CHANNELS,
        X_AT=x_at,
        SCALED=False,
        warps=4,
    )
    step.launches.launch(
        step_convolution_kernel,
        (pieces, *step.by_sequence(tokens)),
        space.bcx,
        space.bcx.shape[1],
        space.rows,
        words,
        state,
        w.taps,
        space.flat,
        WIDTH=spec.channels,
        BLOCK=STEP_CHANNELS,
        TAPS=spec.taps,
        CONFIG=config,
        C_AT=c_at,
        warps=4,
    )
    keep_step_rows(step, space.rows, block.state, tokens)
    return project_back(step, number, block, space.flat, spec.channels, tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the short convolution of a chunk of tokens; its rows are kept."""
    spec, w, h = block.residual.block, block.weights, chunk.h
    tokens, channels, shape = len(chunk.x), spec.channels, spec.recurrent
    state, words = prompt.recurrent_state(chunk, block)
    bcx, inner = prompt.products.stacked(h.rows, w.projections), prompt.products.hidden(tokens, channels)
    rows = prompt.space("short_convolution").rows
    size = min(CHUNK_CHANNELS, next_power_of_two(channels))
    product_rows_kernel[(tokens, -(-channels // size))](
        bcx, h.scales, bcx.stride(0), rows,
        WIDTH=channels, ROW=shape.row_width, BLOCK=size, X_AT=2 * channels, SCALED=True, DEPENDENT=False,
        num_warps=8,
    )  # fmt: skip
    chunk_convolution_kernel[(tokens,)](
        bcx, h.scales, bcx.stride(0), rows, words, state_args(state), w.taps, inner.rows, inner.scales,
        WIDTH=channels, BLOCK=size, TAPS=spec.taps, CONFIG=state_config(shape), num_warps=8,
    )  # fmt: skip
    keep_chunk_rows(rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    add_product(prompt, chunk, number, block, inner)
