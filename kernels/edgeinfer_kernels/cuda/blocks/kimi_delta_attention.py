"""Kimi Delta Attention on a GPU: weights, buffers, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.kimi_delta_attention import (
    KimiDeltaAttentionSpec,
    KimiDeltaAttentionWeights,
)
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    DeviceConvolution,
    MatrixStateSpace,
    take_stack,
    take_vectors,
)
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    inactive_bytes as inactive_bytes,
)
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    take_state as take_state,
)
from edgeinfer_kernels.cuda.blocks.gated_delta_net import PromptSpace as DeltaSpace
from edgeinfer_kernels.cuda.blocks.gated_delta_net import (
    convolve_chunk,
    convolve_step,
    finish_chunk,
    finish_step,
    net_config,
)
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates as HostStates,
)
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows
from edgeinfer_kernels.cuda.triton_ops.recurrent.kimi_delta_attention import (
    key_decay_kernel,
    low_rank_rows_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "kimi delta attention"
"""The name of the weights in lists of device memory."""
DECAY_BLOCK = 1024
"""Elements that a program of `key_decay_kernel` computes."""


@dataclass(frozen=True)
class DeviceKimiDeltaAttention(DeviceConvolution):
    """The weights of a Kimi Delta Attention on the device."""

    a: Tensor
    dt: Tensor
    norm: Tensor
    f2: DeviceMatrix
    g2: DeviceMatrix


def take(
    builder: DeviceBuilder,
    spec: KimiDeltaAttentionSpec,
    w: KimiDeltaAttentionWeights,
    shards: Sequence[Shard] = (),
) -> DeviceKimiDeltaAttention:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    taps, a, dt, norm = take_vectors(builder, w.taps, w.a, w.dt, w.norm)
    stack = take_stack(builder, w.q, w.k, w.v, w.f1, w.g1, w.beta)
    f2, g2, output = map(builder.matrix, (w.f2, w.g2, w.output))
    return DeviceKimiDeltaAttention(stack, output, taps, a, dt, norm, f2, g2)


class Space(MatrixStateSpace):
    """The buffers of a decode step, shared by all blocks of this kind."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        super().__init__(blocks, arena, step)
        weights: list[DeviceKimiDeltaAttention] = [block.weights for block in blocks]
        specs: list[KimiDeltaAttentionSpec] = [block.residual.block for block in blocks]
        rank, shape = (
            max(spec.head_dim for spec in specs),
            (step.tokens, max(spec.result_width for spec in specs)),
        )
        self.low_f = take_activations(arena, step.tokens, rank, has_floats(*(w.f2 for w in weights)))
        self.low_g = take_activations(arena, step.tokens, rank, has_floats(*(w.g2 for w in weights)))
        self.decays, self.z = (arena.take(shape, torch.float32) for _ in range(2))


class PromptSpace(DeltaSpace):
    """The buffers of a chunk of a prompt, for all blocks of this kind."""

    def __init__(self, specs: Sequence[Any], arena: Arena, chunk: int) -> None:
        super().__init__(specs, arena, chunk)
        self.low = arena.take((chunk * 2 * max(spec.head_dim for spec in specs),), torch.float16)
        self.low_scales = arena.take((chunk,), torch.float32)


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
    parts = (w.f2, space.low_f, space.decays), (w.g2, space.low_g, space.z)
    for index, (matrix, low, out) in enumerate(parts):
        activations = low.of_blocks(matrix.shapes.blocks)
        launches.norms.quantize(projected[:, low_at + index * rank :], rank, activations, tokens, stride)
        inputs = Source(activations, step.workspace.sum_squares[0])
        launches.rows((matrix,), inputs, out, None, "qkv", tokens)
    convolve_step(step, block, net, projected, (beta_at, 0), tokens)
    launches.launch(
        key_decay_kernel,
        (tokens, -(-spec.result_width // DECAY_BLOCK)),
        space.decays,
        space.decays,
        space.decays.stride(0),
        w.a,
        w.dt,
        space.rows,
        NET=net,
        BLOCK=DECAY_BLOCK,
        SCALED=False,
        warps=4,
    )
    return finish_step(step, number, block, net, space.z, tokens)


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
    state = convolve_chunk(prompt, chunk, block, net, ScaledRows(projected, h.scales), (beta_at, 0))
    low = space.low[: tokens * 2 * rank].view(tokens, 2 * rank)
    low_rank_rows_kernel[(tokens,)](
        projected[:, low_at:], h.scales, stride, low, space.low_scales,
        WIDTH=2 * rank, BLOCK=next_power_of_two(2 * rank), num_warps=1,
    )  # fmt: skip
    decays = products.product(low[:, :rank], w.f2)
    key_decay_kernel[(tokens, -(-spec.result_width // DECAY_BLOCK))](
        decays, space.low_scales, decays.stride(0), w.a, w.dt, space.rows,
        NET=net, BLOCK=DECAY_BLOCK, SCALED=True, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    z = ScaledRows(products.product(low[:, rank:], w.g2), space.low_scales)
    finish_chunk(prompt, chunk, number, block, net, state, z)
