"""Gated delta net on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.block import StepShape
from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec, GatedDeltaNetWeights
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates as HostStates,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    keep_chunk_rows,
    keep_step_rows,
    state_args,
    state_config,
    take_recurrent,
)
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows
from edgeinfer_kernels.cuda.triton_ops.gated_delta_net import (
    CHUNK,
    delta_chunk_kernel,
    delta_convolution_kernel,
    delta_rows_kernel,
    delta_step_kernel,
    gate_chunk_kernel,
    gate_step_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import DeltaNetConfig
from edgeinfer_kernels.cuda.triton_ops.kimi_delta_attention import delta_pairs_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.layer_cache import CacheType, padded
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

DeltaRuleSpec = GatedDeltaNetSpec | KimiDeltaAttentionSpec
PART = "gated delta net"
"""The name of the weights in lists of device memory."""
ROW_BLOCK = 1024
"""Elements that a program of `delta_rows_kernel` copies."""
STEP_COLUMNS, CHUNK_COLUMNS = 16, 32
"""Columns of the state that a program of a decode step and of a chunk updates."""


@dataclass(frozen=True)
class DeviceGatedDeltaNet:
    """The weights of a gated delta net on the device; `taps`: (taps, channels)."""

    projections: Stack
    output: DeviceMatrix
    taps: Tensor
    a: Tensor
    dt: Tensor
    norm: Tensor

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.projections.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]


def take(
    builder: DeviceBuilder,
    spec: GatedDeltaNetSpec,
    w: GatedDeltaNetWeights,
    shards: Sequence[Shard] = (),
) -> DeviceGatedDeltaNet:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    vectors = [builder.vector(each) for each in (np.ascontiguousarray(w.taps).reshape(-1), w.a, w.dt, w.norm)]
    taps, a, dt, norm = (vector for vector in vectors if vector is not None)
    stack = builder.stack(((w.qkv, None), (w.z, None), (w.beta, None), (w.alpha, None)))
    return DeviceGatedDeltaNet(stack, builder.matrix(w.output), taps, a, dt, norm)


def take_state(arena: Arena, spec: GatedDeltaNetSpec, positions: int, kind: CacheType) -> RecurrentState:
    """Allocate the state."""
    return take_recurrent(arena, spec.recurrent)


def inactive_bytes(w: DeviceGatedDeltaNet) -> int:
    """Bytes of weights that not every token reads."""
    return 0


def net_config(spec: DeltaRuleSpec, *, key_decay: bool = False) -> DeltaNetConfig:
    """The sizes for kernels; `key_decay`: of a Kimi Delta Attention."""
    shape = spec.recurrent
    return DeltaNetConfig(
        spec.key_heads,
        spec.value_heads,
        spec.head_dim,
        next_power_of_two(spec.head_dim),
        padded(spec.head_dim),
        spec.channels,
        shape.row_width,
        padded(spec.channels),
        padded(spec.value_heads),
        next_power_of_two(spec.value_heads),
        shape.tail_rows * shape.tail_width,
        spec.repeats_each,
        key_decay,
        not key_decay,
    )


class Space:
    """The buffers of a decode step, shared by all gated delta nets."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceGatedDeltaNet] = [block.weights for block in blocks]
        specs: list[GatedDeltaNetSpec] = [block.residual.block for block in blocks]
        values = max(spec.value_width for spec in specs)
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, values, outputs)
        self.projected = arena.take((step.tokens, max(w.projections.rows for w in weights)), torch.float32)
        self.rows = arena.take((step.tokens * max(s.recurrent.row_width for s in specs),), torch.float32)
        channels = max(spec.channels for spec in specs)
        self.conv = arena.take(((step.tokens + RING_ROWS) * channels,), torch.float32)
        self.values = arena.take((step.tokens * values,), torch.float32)


class PromptSpace:
    """The buffers of a chunk of a prompt, for all gated delta nets."""

    def __init__(self, specs: Sequence[GatedDeltaNetSpec], arena: Arena, chunk: int) -> None:
        self.rows = arena.take((chunk * max(spec.recurrent.row_width for spec in specs),), torch.float32)
        channels = max(spec.channels for spec in specs)
        self.conv = arena.take(((chunk + RING_ROWS) * channels,), torch.float32)
        self.values = arena.take((chunk * max(spec.value_width for spec in specs),), torch.float32)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections, the convolution, the recurrence, the gated norm, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("gated_delta_net")
    launches, net = step.launches, net_config(spec)
    z_at, beta_at, alpha_at = w.projections.begins(_lengths(spec), padded=True)[1:]
    launches.stacked(w.projections, source, space.projected, None, tokens)
    launches.launch(
        delta_rows_kernel,
        (tokens, -(-spec.channels // ROW_BLOCK) + 1),
        space.projected,
        space.projected,
        space.projected.shape[1],
        w.a,
        w.dt,
        space.rows,
        NET=net,
        BETA_AT=beta_at,
        ALPHA_AT=alpha_at,
        BLOCK=ROW_BLOCK,
        SCALED=False,
        warps=4,
    )
    recur_step(step, block, space, net, tokens)
    conv_out = gate_step(step, block, space, net, space.projected[:, z_at:], tokens)
    return step.close_block(number, w.output, None, conv_out, "output", tokens)


def recur_step(
    step: "DecodeStep", block: DeviceBlock, space: "Space", net: DeltaNetConfig, tokens: int
) -> None:
    """The convolution and the recurrence of a decode step; results to `space.values`."""
    spec, words = block.residual.block, step.workspace.state
    state, config = state_args(block.state), state_config(spec.recurrent)
    step.launches.launch(
        delta_convolution_kernel,
        (tokens + RING_ROWS, 2 * spec.key_heads + spec.value_heads),
        space.rows,
        words,
        state,
        block.weights.taps,
        space.conv,
        spec.norm.epsilon,
        NET=net,
        CONFIG=config,
        TAPS=spec.taps,
        warps=1,
    )
    step.launches.launch(
        delta_step_kernel,
        (spec.value_heads, -(-spec.head_dim // STEP_COLUMNS)),
        space.rows,
        space.conv,
        words,
        state,
        space.values,
        NET=net,
        CONFIG=config,
        COLUMNS=STEP_COLUMNS,
        warps=4,
    )
    keep_step_rows(step, space.rows, block.state, tokens)


def gate_step(
    step: "DecodeStep", block: DeviceBlock, space: "Space", net: DeltaNetConfig, z: Tensor, tokens: int
) -> Activations:
    """The gated norm of the results of a decode step, as the input of the last projection."""
    spec, w = block.residual.block, block.weights
    step.launches.launch(
        gate_step_kernel,
        (tokens, spec.value_heads),
        space.values,
        z,
        z.stride(0),
        w.norm,
        spec.norm.epsilon,
        space.values,
        NET=net,
        warps=1,
    )
    conv_out = space.conv_out.of_blocks(w.output.shapes.blocks)
    step.launches.quantize(space.values, spec.value_width, conv_out, tokens)
    return conv_out


def _lengths(spec: GatedDeltaNetSpec) -> tuple[int, int, int, int]:
    """Rows of the projections of q, k and v, of z, β and a."""
    return spec.channels, spec.value_width, spec.value_heads, spec.value_heads


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the gated delta net of a chunk of tokens; its state is written."""
    spec, w, h, tokens = block.residual.block, block.weights, chunk.h, len(chunk.x)
    net, space = net_config(spec), prompt.space("gated_delta_net")
    projected = prompt.products.stacked(h.rows, w.projections)
    z_at, beta_at, alpha_at = w.projections.begins(_lengths(spec), padded=False)[1:]
    delta_rows_kernel[(tokens, -(-spec.channels // ROW_BLOCK) + 1)](
        projected, h.scales, projected.stride(0), w.a, w.dt, space.rows,
        NET=net, BETA_AT=beta_at, ALPHA_AT=alpha_at, BLOCK=ROW_BLOCK, SCALED=True, DEPENDENT=False,
        num_warps=4,
    )  # fmt: skip
    recur_chunk(prompt, chunk, block, space, net)
    gate_chunk(prompt, chunk, number, block, space, net, ScaledRows(projected[:, z_at:], h.scales))


def recur_chunk(
    prompt: "Prefill",
    chunk: "Chunk",
    block: "PromptBlock",
    space: PromptSpace,
    net: DeltaNetConfig,
    pairs: Tensor | None = None,
) -> None:
    """The convolution and the recurrence of a chunk, results to `space.values`; the state is written.

    pairs: memory for the results of `delta_pairs_kernel`, if each key element has a decay.
    """
    spec, tokens = block.residual.block, len(chunk.x)
    state, words = prompt.recurrent_state(chunk, block)
    args, config = state_args(state), state_config(spec.recurrent)
    delta_convolution_kernel[(tokens + RING_ROWS, 2 * spec.key_heads + spec.value_heads)](
        space.rows, words, args, block.weights.taps, space.conv, spec.norm.epsilon,
        NET=net, CONFIG=config, TAPS=spec.taps, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    if pairs is not None:
        delta_pairs_kernel[(-(-(tokens + RING_ROWS) // CHUNK), spec.value_heads)](
            space.rows, space.conv, words, args, pairs, NET=net, CONFIG=config, COUNT=CHUNK, num_warps=4
        )
    delta_chunk_kernel[(spec.value_heads, -(-spec.head_dim // CHUNK_COLUMNS))](
        space.rows, space.conv, words, args, space.conv if pairs is None else pairs, space.values,
        NET=net, CONFIG=config, COLUMNS=CHUNK_COLUMNS, COUNT=CHUNK, num_warps=8,
    )  # fmt: skip
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)


def gate_chunk(
    prompt: "Prefill",
    chunk: "Chunk",
    number: int,
    block: "PromptBlock",
    space: PromptSpace,
    net: DeltaNetConfig,
    z: ScaledRows,
) -> None:
    """x += W_out · the gated norm of the results of a chunk."""
    spec, w, tokens = block.residual.block, block.weights, len(chunk.x)
    inner = prompt.products.hidden(tokens, spec.value_width)
    gate_chunk_kernel[(tokens,)](
        space.values, z.rows, z.scales, z.rows.stride(0), w.norm, spec.norm.epsilon,
        inner.rows, inner.scales, NET=net, num_warps=4,
    )  # fmt: skip
    y = prompt.products.product(inner.rows, w.output)
    prompt.add(chunk, number, y, None, inner.scales)
