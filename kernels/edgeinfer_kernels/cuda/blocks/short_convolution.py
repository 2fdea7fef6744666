"""Short convolution on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.block import StepShape
from edgeinfer_kernels.blocks.short_convolution import ShortConvolutionSpec, ShortConvolutionWeights
from edgeinfer_kernels.cuda.cache.recent_rows import HostRows, take_rows
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.short_convolution import (
    chunk_convolution_kernel,
    chunk_rows_kernel,
    step_convolution_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.recent_rows import RecentRows
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import LayerSplit

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


@dataclass(frozen=True)
class DeviceShortConvolution:
    """The weights of a short convolution on the device; `taps`: (taps, channels)."""

    bcx: Stack
    output: DeviceMatrix
    taps: Tensor

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.bcx.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]


def take(
    builder: DeviceBuilder,
    spec: ShortConvolutionSpec,
    w: ShortConvolutionWeights,
    split: LayerSplit | None,
) -> DeviceShortConvolution:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    taps = builder.vector(np.ascontiguousarray(w.taps).reshape(-1))
    assert taps is not None
    return DeviceShortConvolution(
        builder.stack(((w.b, None), (w.c, None), (w.x, None))), builder.matrix(w.output), taps
    )


def take_state(arena: Arena, spec: ShortConvolutionSpec, positions: int, kind: CacheType) -> RecentRows:
    """Allocate the recent rows."""
    return take_rows(arena, positions, spec.recurrent_rows, spec.channels)


def inactive_bytes(w: DeviceShortConvolution) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class HostStates(HostRows):
    """The recent rows of blocks on the CPU, one block at a time."""

    def __init__(
        self, specs: Mapping[BlockIndex, ShortConvolutionSpec], positions: int, arena: Arena
    ) -> None:
        shapes = {index: (spec.recurrent_rows, spec.channels) for index, spec in specs.items()}
        super().__init__(shapes, positions, arena)


class Space:
    """The buffers of a decode step, shared by all short convolutions."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceShortConvolution] = [block.weights for block in blocks]
        channels = max(block.residual.block.channels for block in blocks)
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, channels, outputs)
        self.bcx = arena.take((step.tokens, max(w.bcx.rows for w in weights)), torch.float32)
        self.flat = arena.take((step.tokens, channels), torch.float32)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The three projections, then the convolution, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("short_convolution")
    step.launches.stacked(w.bcx, source, space.bcx, None, tokens)
    c_at, x_at = _part_begins(spec, w)
    step.launches.launch(
        step_convolution_kernel,
        (-(-spec.channels // STEP_CHANNELS), tokens),
        space.bcx,
        space.bcx.shape[1],
        step.workspace.state,
        block.state.ring,
        block.state.checkpoints,
        block.state.checkpoints.shape[1] // spec.recurrent_rows,
        w.taps,
        space.flat,
        WIDTH=spec.channels,
        BLOCK=STEP_CHANNELS,
        TAPS=spec.taps,
        C_AT=c_at,
        X_AT=x_at,
        warps=4,
    )
    conv_out = space.conv_out.of_blocks(w.output.shapes.blocks)
    step.launches.quantize(space.flat, spec.channels, conv_out, tokens)
    return step.close_block(number, w.output, None, conv_out, "output", tokens)


def _part_begins(spec: ShortConvolutionSpec, w: DeviceShortConvolution) -> tuple[int, int]:
    """Where c and x begin in a row of the projections; every matrix of the stack is padded."""
    begins, row = [], 0
    for part in w.bcx.parts:
        begins += [row + at for at in range(0, part.shapes.rows, spec.channels)]
        row += padded_rows(part.shapes.rows)
    return begins[1], begins[2]


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the short convolution of a chunk of tokens; its rows are kept."""
    spec, w, h, start = block.residual.block, block.weights, chunk.h, chunk.start
    tokens, channels = len(chunk.x), spec.channels
    state = block.state or prompt.host_states("short_convolution").fetch(block.index, start)
    bcx, inner = prompt.products.stacked(h.rows, w.bcx), prompt.products.hidden(tokens, channels)
    size = min(CHUNK_CHANNELS, next_power_of_two(channels))
    chunk_convolution_kernel[(tokens,)](
        bcx, h.scales, bcx.stride(0), start, state.ring, w.taps, inner.rows, inner.scales,
        WIDTH=channels, BLOCK=size, TAPS=spec.taps, num_warps=8,
    )  # fmt: skip
    chunk_rows_kernel[(tokens, -(-channels // size))](
        bcx, h.scales, bcx.stride(0), start, tokens, state.ring, state.checkpoints,
        state.checkpoints.shape[1] // state.rows, WIDTH=channels, BLOCK=size, TAPS=spec.taps, num_warps=8,
    )  # fmt: skip
    if block.state is None:
        prompt.host_states("short_convolution").put_back(block.index, state, start, tokens)
    y = prompt.products.product(inner.rows, w.output)
    prompt.add(chunk, number, y, None, inner.scales)
