"""Gated delta net on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.gated_delta_net import (
    DELTA_POSITIONS,
    GatedDeltaNetSpec,
    GatedDeltaNetWeights,
    pairs_size,
)
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    DeviceConvolution,
    MatrixStatePromptSpace,
    MatrixStateSpace,
    activations_of,
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
    state_args,
    state_config,
    step_config,
)
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows
from edgeinfer_kernels.cuda.triton_ops.recurrent.delta_gates import gate_chunk_kernel, gate_step_kernel
from edgeinfer_kernels.cuda.triton_ops.recurrent.gated_delta_net import (
    DecayVectors,
    DeltaNetConfig,
    ProjectedRows,
    delta_chunk_kernel,
    delta_convolution_kernel,
    delta_pairs_kernel,
    delta_step_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.recurrent.kimi_delta_attention import delta_key_pairs_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
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
STEP_COLUMNS, CHUNK_COLUMNS = 8, 32
"""Columns of the state that a program of a decode step and of a chunk updates."""
STEP_WARPS = 1
"""Warps of a program that updates the state in a decode step: with one, sums over keys need no barrier."""
PENDING_PROGRAMS = 3
"""Programs of a decode step's convolution for a head's pending positions, besides one for each token."""
KEPT_PIECE = 256
"""Columns of a row of the state that a program writes after a decode step."""
Space = MatrixStateSpace


class PromptSpace(MatrixStatePromptSpace):
    """The buffers of a chunk of a prompt, with what is prepared for the recurrence."""

    def __init__(self, specs: Sequence[DeltaRuleSpec], arena: Arena, chunk: int) -> None:
        super().__init__(specs, arena, chunk)
        self.pairs = arena.take((max(pairs_size(spec, chunk) for spec in specs),), torch.float32)


@dataclass(frozen=True)
class DeviceGatedDeltaNet(DeviceConvolution):
    """The weights of a gated delta net on the device."""

    a: Tensor
    dt: Tensor
    norm: Tensor


def take(
    builder: DeviceBuilder,
    spec: GatedDeltaNetSpec,
    w: GatedDeltaNetWeights,
    shards: Sequence[Shard] = (),
) -> DeviceGatedDeltaNet:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    vectors = take_vectors(builder, w.taps, w.a, w.dt, w.norm)
    stack = take_stack(builder, w.qkv, w.z, w.beta, w.alpha)
    return DeviceGatedDeltaNet(stack, builder.matrix(w.output), *vectors)


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
        spec.pairs_width,
        spec.taps,
    )


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections, the convolution, the recurrence, the gated norm, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("gated_delta_net")
    launches, net = step.launches, net_config(spec)
    z_at, beta_at, alpha_at = w.projections.begins(_lengths(spec), padded=True)[1:]
    launches.stacked(w.projections, source, space.projected, None, tokens)
    convolve_step(step, block, net, space.projected, (beta_at, alpha_at), tokens)
    return finish_step(step, number, block, net, space.projected[:, z_at:], tokens)


def convolve_step(
    step: "DecodeStep",
    block: DeviceBlock,
    net: DeltaNetConfig,
    projected: Tensor,
    gates_at: tuple[int, int],
    tokens: int,
) -> None:
    """Launch what writes the rows of the state of a decode step, and the results of the convolution.
    `gates_at`: where β and the decay begin in a row of the projections.
    """
    spec, w, space = block.residual.block, block.weights, step.space(block.residual.block.kind)
    (beta_at, alpha_at), (own, sequences) = gates_at, step.by_sequence(tokens)
    positions = own if step.is_batch else own + PENDING_PROGRAMS
    step.launches.launch(
        delta_convolution_kernel,
        (positions, 2 * spec.key_heads + spec.value_heads + 1, sequences),
        ProjectedRows(projected, projected, projected.stride(0)),
        DecayVectors(w.a, w.dt),
        *(space.rows, step.workspace.state, state_args(block.state), w.taps, space.conv, spec.norm.epsilon),
        NET=net,
        CONFIG=step_config(step, spec.recurrent),
        BETA_AT=beta_at,
        ALPHA_AT=alpha_at,
        SCALED=False,
        warps=1,
    )


def finish_step(
    step: "DecodeStep", number: int, block: DeviceBlock, net: DeltaNetConfig, z: Tensor, tokens: int
) -> "Source":
    """What follows the convolution: the recurrence, the gated norm, and the last projection."""
    spec, w, words = block.residual.block, block.weights, step.workspace.state
    space, (own, sequences) = step.space(spec.kind), step.by_sequence(tokens)
    paths = tokens if step.is_tree else sequences
    state, config = state_args(block.state), step_config(step, spec.recurrent)
    step.launches.launch(
        delta_step_kernel,
        (spec.value_heads, -(-spec.head_dim // STEP_COLUMNS), paths),
        space.rows,
        space.conv,
        words,
        state,
        space.values,
        NET=net,
        CONFIG=config,
        COLUMNS=STEP_COLUMNS,
        warps=STEP_WARPS,
    )
    out = activations_of(step, block) if spec.head_dim % 16 == 0 else None
    kept = (config.tail_rows + own) * -(-config.row_width // KEPT_PIECE)
    step.launches.launch(
        gate_step_kernel,
        (own * spec.value_heads + kept, 1, sequences),
        *(space.values, z, z.stride(0), w.norm, spec.norm.epsilon),
        space.values if out is None else out.words,
        *(space.rows, words, state, own),
        NET=net,
        CONFIG=config,
        BLOCK=KEPT_PIECE,
        OUT=None if out is None else out.config,
        warps=1,
    )
    results = space.values if out is None else None
    return project_back(step, number, block, results, spec.result_width, tokens)


def _lengths(spec: GatedDeltaNetSpec) -> tuple[int, int, int, int]:
    """Rows of the projections of q, k and v, of z, β and a."""
    return spec.channels, spec.value_width, spec.value_heads, spec.value_heads


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the gated delta net of a chunk of tokens; its state is written."""
    spec, w, h = block.residual.block, block.weights, chunk.h
    net, projected = net_config(spec), prompt.products.stacked(h.rows, w.projections)
    z_at, beta_at, alpha_at = w.projections.begins(_lengths(spec), padded=False)[1:]
    rows = ScaledRows(projected, h.scales)
    state = convolve_chunk(prompt, chunk, block, net, rows, (beta_at, alpha_at))
    finish_chunk(prompt, chunk, number, block, net, state, ScaledRows(projected[:, z_at:], h.scales))


def convolve_chunk(
    prompt: "Prefill",
    chunk: "Chunk",
    block: "PromptBlock",
    net: DeltaNetConfig,
    projected: ScaledRows,
    gates_at: tuple[int, int],
) -> tuple[RecurrentState, Tensor]:
    """As `convolve_step`, for a chunk of a prompt; returns `Prefill.recurrent_state`."""
    spec, w = block.residual.block, block.weights
    space, (state, words) = prompt.space(spec.kind), prompt.recurrent_state(chunk, block)
    beta_at, alpha_at = gates_at
    delta_convolution_kernel[(len(chunk.x) + RING_ROWS, 2 * spec.key_heads + spec.value_heads + 1)](
        ProjectedRows(projected.rows, projected.scales, projected.rows.stride(0)), DecayVectors(w.a, w.dt),
        space.rows, words, state_args(state), w.taps, space.conv, spec.norm.epsilon,
        NET=net, CONFIG=state_config(spec.recurrent), BETA_AT=beta_at, ALPHA_AT=alpha_at, SCALED=True,
        DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    return state, words


def finish_chunk(
    prompt: "Prefill",
    chunk: "Chunk",
    number: int,
    block: "PromptBlock",
    net: DeltaNetConfig,
    of_chunk: tuple[RecurrentState, Tensor],
    z: ScaledRows,
) -> None:
    """As `finish_step`, for a chunk of a prompt; `of_chunk`: what `convolve_chunk` returned."""
    spec, w, tokens = block.residual.block, block.weights, len(chunk.x)
    space, (state, words) = prompt.space(spec.kind), of_chunk
    args, config = state_args(state), state_config(spec.recurrent)
    pairs_kernel = delta_key_pairs_kernel if net.key_decay else delta_pairs_kernel
    pairs_kernel[(-(-(tokens + RING_ROWS) // DELTA_POSITIONS), spec.value_heads)](
        space.rows, space.conv, words, args, space.pairs,
        NET=net, CONFIG=config, COUNT=DELTA_POSITIONS, num_warps=4,
    )  # fmt: skip
    delta_chunk_kernel[(spec.value_heads, -(-spec.head_dim // CHUNK_COLUMNS))](
        space.rows, space.conv, words, args, space.pairs, space.values,
        NET=net, CONFIG=config, COLUMNS=CHUNK_COLUMNS, COUNT=DELTA_POSITIONS, num_warps=8,
    )  # fmt: skip
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    inner = prompt.products.hidden(tokens, spec.result_width)
    gate_chunk_kernel[(tokens,)](
        space.values, z.rows, z.scales, z.rows.stride(0), w.norm, spec.norm.epsilon,
        inner.rows, inner.scales, NET=net, num_warps=4,
    )  # fmt: skip
    add_product(prompt, chunk, number, block, inner)
