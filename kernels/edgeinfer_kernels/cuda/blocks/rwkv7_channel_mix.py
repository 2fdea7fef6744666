"""The channel mixing of RWKV-7 on a GPU: a feed-forward whose input is between two tokens; and the launches
for such inputs, which the time mixing has too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.blocks.rwkv7_channel_mix import Rwkv7ChannelMixSpec, Rwkv7ChannelMixWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cuda.blocks import feed_forward
from edgeinfer_kernels.cuda.blocks.common.convolution_block import take_state, take_vectors
from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates,
    keep_chunk_rows,
    keep_step_rows,
    state_args,
    state_config,
    step_config,
)
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NORMS
from edgeinfer_kernels.cuda.triton_ops.recurrent.rwkv7 import (
    Rwkv7Config,
    token_shift_chunk_kernel,
    token_shift_step_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock, DeviceNorms
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.decoder import ResidualBlock
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

__all__ = ["HostStates", "Space", "decode", "prefill", "take", "take_state"]
PART = "channel mixing"
"""The name of the weights in lists of device memory."""
NORMALIZES_INPUT = True
ACTIVATION: Activation = "relu_squared"


@dataclass(frozen=True)
class DeviceChannelMix(DeviceFeedForward):
    """The weights of a channel mixing on the device: a feed-forward without a gate, and μ."""

    lerp: Tensor = field(kw_only=True)


def take(
    builder: DeviceBuilder, spec: Rwkv7ChannelMixSpec, w: Rwkv7ChannelMixWeights, shards: Sequence[Shard] = ()
) -> DeviceChannelMix:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    (lerp,) = take_vectors(builder, w.lerp)
    up, down = builder.matrix(w.key), builder.matrix(w.value)
    return DeviceChannelMix(None, up, down, None, None, None, lerp=lerp)


def inactive_bytes(w: DeviceChannelMix) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step, shared by all channel mixings."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceChannelMix] = [block.weights for block in blocks]
        width = max(block.residual.block.width for block in blocks)
        self.mixed = take_activations(arena, step.tokens, width, has_floats(*(w.up for w in weights)))
        floats = has_floats(*(w.down for w in weights))
        self.hidden = feed_forward.Space(blocks, arena, step._replace(hidden_floats=floats))
        self.rows = arena.take((step.tokens * padded(width),), torch.float32)


class PromptSpace:
    """The buffers of a chunk of a prompt, for all channel mixings."""

    def __init__(self, specs: Sequence[Rwkv7ChannelMixSpec], arena: Arena, chunk: int) -> None:
        width = max(spec.width for spec in specs)
        self.rows = arena.take((chunk * padded(width),), torch.float32)
        rows, scales = arena.take((chunk * width,), torch.float16), arena.take((chunk,), torch.float32)
        self.mixed = ScaledRows(rows, scales)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """The interpolated input, then the feed-forward."""
    w, space = block.weights, step.space("rwkv7_channel_mix")
    hidden = space.hidden.hidden(w)
    shift_step(step, block, w.lerp, space.rows, space.mixed, tokens)
    step.launches.gated(ACTIVATION, w, Source(space.mixed, source.sum_squares), hidden, tokens)
    keep_step_rows(step, space.rows, block.state, tokens)
    return step.close_block(number, w.down, None, hidden, "down", tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the channel mixing of a chunk of tokens; its state is written."""
    w, space, tokens = block.weights, prompt.space("rwkv7_channel_mix"), len(chunk.x)
    state, words = prompt.recurrent_state(chunk, block)
    (mixed,) = shift_chunk(
        chunk.x, block.residual, block.norms, state, words, w.lerp, space.rows, space.mixed
    )
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    y, scales = prompt.products.dense(ACTIVATION, w, mixed)
    prompt.add(chunk, number, y, None, scales)


def config_of(residual: ResidualBlock[Any], norms: DeviceNorms) -> Rwkv7Config:
    """The sizes for kernels."""
    spec = residual.block
    norm, width = residual.norm.kind, spec.width
    sizes = width, next_power_of_two(width), int(NORMS[norm]), norms.norm_bias is not None
    if not hasattr(spec, "head_dim"):
        return Rwkv7Config(*sizes)
    shape, dimensions = spec.recurrent, next_power_of_two(spec.head_dim)
    return Rwkv7Config(*sizes, spec.head_dim, dimensions, shape.tail_rows * shape.tail_width)


def shift_step(
    step: "DecodeStep", block: DeviceBlock, lerp: Tensor, rows: Tensor, out: Activations, tokens: int
) -> None:
    """The interpolated inputs of a decode step, one for each row of `lerp`, to `out`."""
    width, residual = block.residual.block.width, block.residual
    own, sequences = step.by_sequence(tokens)
    step.launches.launch(
        token_shift_step_kernel,
        (own, lerp.numel() // width, sequences),
        step.workspace.x,
        _norm_args(residual, block.norms),
        rows,
        step.workspace.state,
        state_args(block.state),
        lerp,
        out.words,
        NET=config_of(residual, block.norms),
        CONFIG=step_config(step, block.state.shape),
        OUT=out.config,
        TOKENS=MAX_TOKENS,
        warps=max(4, warps_for(width)),
    )


def shift_chunk(
    x: Tensor,
    residual: ResidualBlock[Any],
    norms: DeviceNorms,
    state: RecurrentState,
    words: Tensor,
    lerp: Tensor,
    rows: Tensor,
    out: ScaledRows,
) -> list[ScaledRows]:
    """The interpolated inputs of a chunk, one for each row of `lerp`; `out`: a buffer for all."""
    tokens, width = x.shape
    count = lerp.numel() // width
    inputs = out.rows[: count * tokens * width].view(count, tokens, width)
    scales = out.scales[: count * tokens].view(count, tokens)
    token_shift_chunk_kernel[(tokens, count)](
        x, _norm_args(residual, norms), rows, words, state_args(state), lerp, inputs, scales,
        NET=config_of(residual, norms), CONFIG=state_config(state.shape),
        num_warps=max(4, warps_for(width)),
    )  # fmt: skip
    return [ScaledRows(*each) for each in zip(inputs, scales, strict=True)]


def _norm_args(residual: ResidualBlock[Any], norms: DeviceNorms) -> NormArgs:
    bias = norms.norm if norms.norm_bias is None else norms.norm_bias
    return NormArgs(norms.norm, bias, residual.norm.epsilon)
