"""Kimi Delta Attention on a GPU: weights, buffers, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.block import StepShape
from edgeinfer_kernels.blocks.kimi_delta_attention import (
    KimiDeltaAttentionSpec,
    KimiDeltaAttentionWeights,
)
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.blocks.gated_delta_net import (
    ROW_BLOCK,
    gate_chunk,
    gate_step,
    net_config,
    recur_chunk,
    recur_step,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates as HostStates,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import take_recurrent
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows
from edgeinfer_kernels.cuda.triton_ops.gated_delta_net import delta_rows_kernel
from edgeinfer_kernels.cuda.triton_ops.kimi_delta_attention import key_decay_kernel, low_rank_rows_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "kimi delta attention"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceKimiDeltaAttention:
    """The weights on the device; `taps`: (taps, channels)."""

    projections: Stack
    f2: DeviceMatrix
    g2: DeviceMatrix
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
    spec: KimiDeltaAttentionSpec,
    w: KimiDeltaAttentionWeights,
    shards: Sequence[Shard] = (),
) -> DeviceKimiDeltaAttention:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    vectors = [builder.vector(each) for each in (np.ascontiguousarray(w.taps).reshape(-1), w.a, w.dt, w.norm)]
    taps, a, dt, norm = (vector for vector in vectors if vector is not None)
    stack = builder.stack([(matrix, None) for matrix in (w.q, w.k, w.v, w.f1, w.g1, w.beta)])
    f2, g2, output = map(builder.matrix, (w.f2, w.g2, w.output))
    return DeviceKimiDeltaAttention(stack, f2, g2, output, taps, a, dt, norm)


def take_state(arena: Arena, spec: KimiDeltaAttentionSpec, positions: int, kind: CacheType) -> RecurrentState:
    """Allocate the state."""
    return take_recurrent(arena, spec.recurrent)


def inactive_bytes(w: DeviceKimiDeltaAttention) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step, shared by all blocks of this kind."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceKimiDeltaAttention] = [block.weights for block in blocks]
        specs: list[KimiDeltaAttentionSpec] = [block.residual.block for block in blocks]
        width, rank = max(spec.width for spec in specs), max(spec.head_dim for spec in specs)
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, width, outputs)
        self.low_f = take_activations(arena, step.tokens, rank, has_floats(*(w.f2 for w in weights)))
        self.low_g = take_activations(arena, step.tokens, rank, has_floats(*(w.g2 for w in weights)))
        self.projected = arena.take((step.tokens, max(w.projections.rows for w in weights)), torch.float32)
        self.decays, self.z = (arena.take((step.tokens, width), torch.float32) for _ in range(2))
        self.rows = arena.take((step.tokens * max(s.recurrent.row_width for s in specs),), torch.float32)
        channels = max(spec.channels for spec in specs)
        self.conv = arena.take(((step.tokens + RING_ROWS) * channels,), torch.float32)
        self.values = arena.take((step.tokens * width,), torch.float32)


class PromptSpace:
    """The buffers of a chunk of a prompt, for all blocks of this kind."""

    def __init__(self, specs: Sequence[KimiDeltaAttentionSpec], arena: Arena, chunk: int) -> None:
        width = max(spec.width for spec in specs)
        self.rows = arena.take((chunk * max(spec.recurrent.row_width for spec in specs),), torch.float32)
        self.conv = arena.take(((chunk + RING_ROWS) * 3 * width,), torch.float32)
        self.values = arena.take((chunk * width,), torch.float32)
        self.low = arena.take((chunk * 2 * max(spec.head_dim for spec in specs),), torch.float16)
        self.low_scales = arena.take((chunk,), torch.float32)
        self.pairs = arena.take((max(spec.pairs_of(chunk + RING_ROWS) for spec in specs),), torch.float32)


def _begins(spec: KimiDeltaAttentionSpec) -> tuple[int, int]:
    """Where F₁ h, with G₁ h after it, and β begin in a row of the projections."""
    return spec.channels, spec.channels + 2 * spec.head_dim


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections, the convolution, the recurrence, the gated norm, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("kimi_delta_attention")
    launches, net, rank = step.launches, net_config(spec, key_decay=True), spec.head_dim
    low_at, beta_at = _begins(spec)
    projected, stride = space.projected, space.projected.shape[1]
    launches.stacked(w.projections, source, projected, None, tokens)
    for number_of, (matrix, low, out) in enumerate(
        ((w.f2, space.low_f, space.decays), (w.g2, space.low_g, space.z))
    ):
        values = projected[:, low_at + number_of * rank :]
        activations = low.of_blocks(matrix.shapes.blocks)
        launches.quantize(values, rank, activations, tokens, stride)
        inputs = Source(activations, step.workspace.sum_squares[0])
        launches.rows((matrix,), inputs, out, None, "qkv", tokens)
    launches.launch(
        delta_rows_kernel,
        (tokens, -(-spec.channels // ROW_BLOCK) + 1),
        projected,
        projected,
        stride,
        w.a,
        w.dt,
        space.rows,
        NET=net,
        BETA_AT=beta_at,
        ALPHA_AT=0,
        BLOCK=ROW_BLOCK,
        SCALED=False,
        warps=4,
    )
    launches.launch(
        key_decay_kernel,
        (tokens, -(-spec.width // ROW_BLOCK)),
        space.decays,
        space.decays,
        space.decays.stride(0),
        w.a,
        w.dt,
        space.rows,
        NET=net,
        BLOCK=ROW_BLOCK,
        SCALED=False,
        warps=4,
    )
    recur_step(step, block, space, net, tokens)
    conv_out = gate_step(step, block, space, net, space.z, tokens)
    return step.close_block(number, w.output, None, conv_out, "output", tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the Kimi Delta Attention of a chunk of tokens; its state is written."""
    spec, w, h, tokens = block.residual.block, block.weights, chunk.h, len(chunk.x)
    net, space, products = (
        net_config(spec, key_decay=True),
        prompt.space("kimi_delta_attention"),
        prompt.products,
    )
    rank, (low_at, beta_at) = spec.head_dim, _begins(spec)
    projected = products.stacked(h.rows, w.projections)
    stride = projected.stride(0)
    delta_rows_kernel[(tokens, -(-spec.channels // ROW_BLOCK) + 1)](
        projected, h.scales, stride, w.a, w.dt, space.rows,
        NET=net, BETA_AT=beta_at, ALPHA_AT=0, BLOCK=ROW_BLOCK, SCALED=True, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    low = space.low[: tokens * 2 * rank].view(tokens, 2 * rank)
    low_rank_rows_kernel[(tokens,)](
        projected[:, low_at:], h.scales, stride, low, space.low_scales,
        WIDTH=2 * rank, BLOCK=next_power_of_two(2 * rank), num_warps=1,
    )  # fmt: skip
    decays = products.product(low[:, :rank], w.f2)
    key_decay_kernel[(tokens, -(-spec.width // ROW_BLOCK))](
        decays, space.low_scales, decays.stride(0), w.a, w.dt, space.rows,
        NET=net, BLOCK=ROW_BLOCK, SCALED=True, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    recur_chunk(prompt, chunk, block, space, net, space.pairs)
    z = ScaledRows(products.product(low[:, rank:], w.g2), space.low_scales)
    gate_chunk(prompt, chunk, number, block, space, net, z)
