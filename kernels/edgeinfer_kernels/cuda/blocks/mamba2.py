"""Mamba-2 on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.mamba2 import PROMPT_CHUNK, Mamba2Spec, Mamba2Weights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    DeviceConvolution,
    MatrixStatePromptSpace,
    MatrixStateSpace,
    add_product,
    convolution_grid,
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
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.recurrent.mamba2 import (
    Mamba2Config,
    mamba2_chunk_kernel,
    mamba2_convolution_kernel,
    mamba2_gate_chunk_kernel,
    mamba2_gate_step_kernel,
    mamba2_states_kernel,
    mamba2_step_kernel,
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

PART = "mamba2"
"""The name of the weights in lists of device memory."""
CONV_BLOCK = 256
"""Channels that a program of `mamba2_convolution_kernel` computes."""
STEP_COLUMNS, CHUNK_COLUMNS = 16, 32
"""Columns of the state that a program of a decode step and of a chunk processes."""
PIECE = 16
"""Rows of the state that a program of a chunk processes at a time."""
Space = MatrixStateSpace


class PromptSpace(MatrixStatePromptSpace):
    """The buffers of a chunk of a prompt, with the states before each PROMPT_CHUNK positions."""

    def __init__(self, specs: Sequence[Mamba2Spec], arena: Arena, chunk: int) -> None:
        super().__init__(specs, arena, chunk)
        self.states = arena.take((max(spec.chunk_states(chunk) for spec in specs),), torch.float32)


@dataclass(frozen=True)
class DeviceMamba2(DeviceConvolution):
    """The weights of a Mamba-2 block on the device."""

    a: Tensor
    d: Tensor
    dt_bias: Tensor
    taps_bias: Tensor | None
    norm: Tensor | None


def take(
    builder: DeviceBuilder, spec: Mamba2Spec, w: Mamba2Weights, shards: Sequence[Shard] = ()
) -> DeviceMamba2:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    taps, a, d, dt_bias = take_vectors(builder, w.taps, w.a, w.d, w.dt_bias)
    stack = take_stack(builder, w.z, w.xbc, w.dt)
    taps_bias, norm = builder.vector(w.taps_bias), builder.vector(w.norm)
    return DeviceMamba2(stack, builder.matrix(w.output), taps, a, d, dt_bias, taps_bias, norm)


def net_config(spec: Mamba2Spec, has_norm: bool, has_bias: bool) -> Mamba2Config:
    """The sizes for kernels."""
    shape = spec.recurrent
    return Mamba2Config(
        spec.heads,
        spec.head_dim,
        spec.state_size,
        next_power_of_two(spec.state_size),
        spec.groups,
        spec.channels,
        shape.row_width,
        padded(spec.channels),
        next_power_of_two(spec.heads),
        spec.group_width,
        next_power_of_two(spec.group_width),
        shape.tail_rows * shape.tail_width,
        has_norm,
        spec.taps,
        has_bias,
    )


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections, the convolution, the recurrence, the gated norm, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("mamba2")
    launches, words, net = (
        step.launches,
        step.workspace.state,
        net_config(spec, w.norm is not None, w.taps_bias is not None),
    )
    state, config = state_args(block.state), step_config(step, spec.recurrent)
    stride = space.projected.shape[1]
    z_at, xbc_at, dt_at = w.projections.begins(_lengths(spec), padded=True)
    launches.stacked(w.projections, source, space.projected, None, tokens)
    xbc = space.projected[:, xbc_at:]
    launches.launch(
        mamba2_convolution_kernel,
        convolution_grid(step, tokens, -(-spec.channels // CONV_BLOCK) + 1),
        *(xbc, xbc, stride, w.dt_bias, space.rows, words, state, w.taps, launches.or_nothing(w.taps_bias)),
        space.conv,
        NET=net,
        CONFIG=config,
        DT_AT=dt_at - xbc_at,
        BLOCK=CONV_BLOCK,
        SCALED=False,
        warps=2,
    )
    paths = tokens if step.is_tree else step.by_sequence(tokens)[1]
    launches.launch(
        mamba2_step_kernel,
        (spec.heads, spec.head_dim // STEP_COLUMNS, paths),
        space.rows,
        space.conv,
        words,
        state,
        w.a,
        w.d,
        space.values,
        NET=net,
        CONFIG=config,
        COLUMNS=STEP_COLUMNS,
        warps=4,
    )
    keep_step_rows(step, space.rows, block.state, tokens)
    launches.launch(
        mamba2_gate_step_kernel,
        (tokens, spec.groups),
        space.values,
        space.projected[:, z_at:],
        stride,
        launches.or_nothing(w.norm),
        spec.norm.epsilon,
        NET=net,
        warps=_gate_warps(spec),
    )
    return project_back(step, number, block, space.values, spec.inner_size, tokens)


def _lengths(spec: Mamba2Spec) -> tuple[int, int, int]:
    """Rows of the projections of z, of x, B and C, and of dt."""
    return spec.inner_size, spec.channels, spec.heads


def _gate_warps(spec: Mamba2Spec) -> int:
    """Warps of a program that normalizes a group."""
    return 8 if spec.group_width > 2048 else 4


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the Mamba-2 block of a chunk of tokens; its state is written."""
    spec, w, h, tokens = block.residual.block, block.weights, chunk.h, len(chunk.x)
    state, words = prompt.recurrent_state(chunk, block)
    net, config = net_config(spec, w.norm is not None, w.taps_bias is not None), state_config(spec.recurrent)
    args, space = state_args(state), prompt.space("mamba2")
    projected = prompt.products.stacked(h.rows, w.projections)
    stride = projected.stride(0)
    z_at, xbc_at, dt_at = w.projections.begins(_lengths(spec), padded=False)
    mamba2_convolution_kernel[(tokens + RING_ROWS, -(-spec.channels // CONV_BLOCK) + 1)](
        projected[:, xbc_at:], h.scales, stride, w.dt_bias, space.rows, words, args, w.taps,
        w.taps if w.taps_bias is None else w.taps_bias, space.conv,
        NET=net, CONFIG=config, DT_AT=dt_at - xbc_at, BLOCK=CONV_BLOCK, SCALED=True, DEPENDENT=False,
        num_warps=2,
    )  # fmt: skip
    parts = spec.heads * -(-spec.head_dim // CHUNK_COLUMNS)
    mamba2_states_kernel[(parts, -(-spec.state_size // PIECE))](
        space.rows, space.conv, words, args, w.a, space.states,
        NET=net, CONFIG=config, COLUMNS=CHUNK_COLUMNS, COUNT=PROMPT_CHUNK, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    mamba2_chunk_kernel[(parts, spec.chunks(tokens))](
        space.rows, space.conv, words, args, w.a, w.d, space.states, space.values,
        NET=net, CONFIG=config, COLUMNS=CHUNK_COLUMNS, COUNT=PROMPT_CHUNK, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    inner = prompt.products.hidden(tokens, spec.inner_size)
    mamba2_gate_chunk_kernel[(tokens,)](
        space.values, projected[:, z_at:], h.scales, stride, w.taps if w.norm is None else w.norm,
        spec.norm.epsilon, inner.rows, inner.scales, NET=net, num_warps=_gate_warps(spec),
    )  # fmt: skip
    add_product(prompt, chunk, number, block, inner)
