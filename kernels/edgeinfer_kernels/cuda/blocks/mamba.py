"""Mamba-1 on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.mamba import MambaSpec, MambaWeights, packed_decay
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    DeviceConvolution,
    add_product,
    project_back,
    take_stack,
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
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import norm_rows
from edgeinfer_kernels.cuda.triton_ops.recurrent.mamba import (
    MambaConfig,
    MambaNorms,
    MambaVectors,
    ScanInputs,
    ScanStrides,
    mamba_convolution_kernel,
    mamba_scan_kernel,
    mamba_selected_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "mamba"
"""The name of the weights in lists of device memory."""
CONV_BLOCK = 256
"""Channels that a program of `mamba_convolution_kernel` computes."""


@dataclass(frozen=True)
class DeviceMamba(DeviceConvolution):
    """The weights of a Mamba block on the device. selected: W_x."""

    selected: Stack
    delta: DeviceMatrix
    vectors: MambaVectors
    norms: MambaNorms


def take(
    builder: DeviceBuilder, spec: MambaSpec, w: MambaWeights, shards: Sequence[Shard] = ()
) -> DeviceMamba:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    taps, a = np.ascontiguousarray(w.taps).reshape(-1), packed_decay(w.a).reshape(-1)
    vectors = MambaVectors(*map(builder.vector, (taps, w.taps_bias, w.dt_bias, a, w.skip)))
    norms = MambaNorms(*map(builder.vector, (w.dt_norm, w.b_norm, w.c_norm)))
    projections, selected = take_stack(builder, w.x, w.z), take_stack(builder, w.dt, w.b, w.c)
    output, delta = builder.matrix(w.output), builder.matrix(w.delta)
    return DeviceMamba(projections, output, vectors.taps, selected, delta, vectors, norms)


def net_config(spec: MambaSpec, has_norm: bool) -> MambaConfig:
    """The sizes for kernels."""
    shape, width = spec.recurrent, padded(spec.channels)
    return MambaConfig(
        spec.channels,
        spec.state_size,
        next_power_of_two(spec.state_size),
        spec.dt_rank,
        next_power_of_two(spec.dt_rank),
        spec.taps,
        shape.row_width,
        width,
        2 * width,
        shape.tail_rows * shape.tail_width,
        has_norm,
    )


class Space:
    """The buffers of a decode step, shared by all Mamba blocks."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceMamba] = [block.weights for block in blocks]
        specs: list[MambaSpec] = [block.residual.block for block in blocks]
        channels, rank = max(spec.channels for spec in specs), max(spec.dt_rank for spec in specs)
        reads_u = has_floats(*(part for w in weights for part in w.selected.parts))
        self.u_input = take_activations(arena, step.tokens, channels, reads_u)
        self.dt_input = take_activations(arena, step.tokens, rank, has_floats(*(w.delta for w in weights)))
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, channels, outputs)
        self.projected = arena.take((step.tokens, max(w.projections.rows for w in weights)), torch.float32)
        self.selected = arena.take((step.tokens, max(w.selected.rows for w in weights)), torch.float32)
        self.deltas = arena.take((step.tokens, padded_rows(channels)), torch.float32)
        self.rows = arena.take((step.tokens * max(s.recurrent.row_width for s in specs),), torch.float32)
        self.u = arena.take((step.tokens * channels,), torch.float32)
        self.dt = arena.take((step.tokens * rank,), torch.float32)
        self.values = arena.take((step.tokens * channels,), torch.float32)


class PromptSpace:
    """The buffers of a chunk of a prompt, for all Mamba blocks."""

    def __init__(self, specs: Sequence[MambaSpec], arena: Arena, chunk: int) -> None:
        channels = max(spec.channels for spec in specs)
        self.rows = arena.take((chunk * max(spec.recurrent.row_width for spec in specs),), torch.float32)
        self.c = arena.take((chunk * max(spec.state_size for spec in specs),), torch.float32)
        self.u, self.z, self.values = (arena.take((chunk * channels,), torch.float32) for _ in range(3))


def scan_shape(spec: MambaSpec) -> tuple[int, int]:
    """(channels of a program of the recurrence, its warps)."""
    states = next_power_of_two(spec.state_size)
    channels = 32 if states <= 32 else 16
    return channels, min(8, max(1, states * channels // 1024))


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections, the convolution, the selection of dt, B and C, the recurrence, and the last one."""
    spec, w, space = block.residual.block, block.weights, step.space("mamba")
    launches, words, has_norm = step.launches, step.workspace.state, w.norms.dt is not None
    net, state = net_config(spec, has_norm), state_args(block.state)
    config, (own, sequences) = step_config(step, spec.recurrent), step.by_sequence(tokens)
    (_, z_at), (_, b_at, c_at) = (
        stack.begins(lengths, padded=True)
        for stack, lengths in zip((w.projections, w.selected), _lengths(spec), strict=True)
    )
    launches.stacked(w.projections, source, space.projected, None, tokens)
    launches.launch(
        mamba_convolution_kernel,
        (own, -(-spec.channels // CONV_BLOCK), sequences),
        *(space.projected, space.projected, space.projected.shape[1], words, state),
        *(w.vectors.taps, w.vectors.taps_bias, space.rows, space.u, space.projected),
        NET=net,
        CONFIG=config,
        Z_AT=z_at,
        BLOCK=CONV_BLOCK,
        SCALED=False,
        warps=2,
    )
    u_input = space.u_input.of_blocks(w.selected.parts[0].shapes.blocks)
    launches.norms.quantize(space.u, spec.channels, u_input, tokens)
    sums = step.workspace.sum_squares[0]
    launches.stacked(w.selected, Source(u_input, sums), space.selected, None, tokens)
    c, stride = space.selected[:, c_at:], space.selected.shape[1]
    norms = MambaNorms(*map(launches.or_nothing, w.norms))
    launches.launch(
        mamba_selected_kernel,
        (tokens,),
        *(space.selected, space.selected, stride, norms, spec.norm.epsilon),
        *(space.rows, space.dt, space.dt, c, stride),
        NET=net,
        B_AT=b_at,
        C_AT=c_at,
        SCALED=False,
        warps=1,
    )
    dt_input = space.dt_input.of_blocks(w.delta.shapes.blocks)
    launches.norms.quantize(space.dt, spec.dt_rank, dt_input, tokens)
    launches.rows((w.delta,), Source(dt_input, sums), space.deltas, None, "qkv", tokens)
    channels, warps = scan_shape(spec)
    z = space.projected[:, z_at:]
    launches.launch(
        mamba_scan_kernel,
        (-(-spec.channels // channels), 1, sequences),
        ScanInputs(space.u, space.deltas, space.deltas, z, c),
        ScanStrides(space.deltas.shape[1], z.stride(0), stride),
        *(w.vectors, space.rows, words, state, space.values),
        NET=net,
        CONFIG=config,
        CHANNELS=channels,
        SCALED=False,
        warps=warps,
    )
    keep_step_rows(step, space.rows, block.state, tokens)
    return project_back(step, number, block, space.values, spec.channels, tokens)


def _lengths(spec: MambaSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of the matrices of W_in and of W_x."""
    return (spec.channels,) * 2, (spec.dt_rank, spec.state_size, spec.state_size)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the Mamba block of a chunk of tokens; its state is written."""
    spec, w, h, tokens = block.residual.block, block.weights, chunk.h, len(chunk.x)
    state, words = prompt.recurrent_state(chunk, block)
    net, config = net_config(spec, w.norms.dt is not None), state_config(spec.recurrent)
    args, space, products = state_args(state), prompt.space("mamba"), prompt.products
    projected = products.stacked(h.rows, w.projections)
    mamba_convolution_kernel[(tokens, -(-spec.channels // CONV_BLOCK))](
        projected, h.scales, projected.stride(0), words, args, w.vectors.taps, w.vectors.taps_bias,
        space.rows, space.u, space.z,
        NET=net, CONFIG=config, Z_AT=spec.channels, BLOCK=CONV_BLOCK, SCALED=True, DEPENDENT=False,
        num_warps=2,
    )  # fmt: skip
    inner = products.hidden(tokens, spec.channels)
    u = space.u[: tokens * spec.channels].view(tokens, spec.channels)
    norm_rows(u, spec.norm, None, None, inner.rows, inner.scales)
    selected = products.stacked(inner.rows, w.selected)
    dt = products.hidden(tokens, spec.dt_rank)
    norms = w.norms if net.has_norm else MambaNorms(u, u, u)
    mamba_selected_kernel[(tokens,)](
        selected, inner.scales, selected.stride(0), norms, spec.norm.epsilon, space.rows, dt.rows, dt.scales,
        space.c, spec.state_size,
        NET=net, B_AT=spec.dt_rank, C_AT=spec.dt_rank + spec.state_size, SCALED=True, DEPENDENT=False,
        num_warps=1,
    )  # fmt: skip
    deltas = products.product(dt.rows, w.delta)
    channels, warps = scan_shape(spec)
    mamba_scan_kernel[(-(-spec.channels // channels),)](
        ScanInputs(space.u, deltas, dt.scales, space.z, space.c),
        ScanStrides(deltas.stride(0), spec.channels, spec.state_size),
        w.vectors, space.rows, words, args, space.values,
        NET=net, CONFIG=config, CHANNELS=channels, SCALED=True, DEPENDENT=False, num_warps=warps,
    )  # fmt: skip
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    inner = products.hidden(tokens, spec.channels)
    values = space.values[: tokens * spec.channels].view(tokens, spec.channels)
    norm_rows(values, spec.norm, None, None, inner.rows, inner.scales)
    add_product(prompt, chunk, number, block, inner)
