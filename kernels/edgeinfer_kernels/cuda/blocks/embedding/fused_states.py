"""The fused hidden states of a target on a GPU, whose keys a block drafter reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec, FusedStatesWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.eagle_kernels import eagle_state_rows_kernel
from edgeinfer_kernels.cuda.draft.states.state_steps import read_states
from edgeinfer_kernels.cuda.prefill.prefill_rows import norm_rows, warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NO_NORM
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "draft input"
"""The name of the weights in lists of device memory."""
KIND = "embedding.fused_states"


@dataclass(frozen=True)
class DeviceFusedStates:
    """The projection of the target's states, and the norm after it."""

    fc: DeviceMatrix
    norm: Tensor
    outputs: Sequence[DeviceMatrix] = ()

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.fc]


def take(
    builder: DeviceBuilder, spec: FusedStatesSpec, w: FusedStatesWeights, shards: Sequence[Shard] = ()
) -> DeviceFusedStates:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    fc, norm = builder.matrix(w.fc), builder.vector(w.norm)
    assert norm is not None
    return DeviceFusedStates(fc, norm)


def take_state(arena: Arena, spec: FusedStatesSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceFusedStates) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The target's states in a decode step, their projections, and these after the norm."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        (block,) = blocks
        features, width = block.residual.block.features, step.hidden_size
        self.states = take_activations(arena, step.tokens, features, step.input_floats)
        self.fused = arena.take((step.tokens, padded_rows(width)), torch.float32)
        self.normed = take_activations(arena, step.tokens, width, step.input_floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """What the blocks that write keys read: norm(W_fc · states). x isn't written."""
    space, w, norm = step.space(KIND), block.weights, block.residual.block.norm
    read_states(step, None, norm, space.states, tokens)
    read = Source(space.states, step.workspace.sum_squares[0])
    step.launches.rows((w.fc,), read, space.fused, None, "down", tokens)
    width = step.model.spec.hidden_size
    step.launches.norms.normalize(space.fused, width, NextNorm(norm, w.norm, None), space.normed, tokens)
    return Source(space.normed, step.workspace.sum_squares[0])


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, of a chunk; x is W_fc · states."""
    (tokens, width), states = chunk.x.shape, prompt.model.states_of_target
    spec, w = block.residual.block, block.weights
    features = next_power_of_two(spec.features)
    rows = prompt.products.hidden(tokens, spec.features)
    eagle_state_rows_kernel[(tokens,)](
        states, chunk.words, NormArgs(None, None, spec.norm.epsilon), rows.rows, rows.scales,
        WIDTH=spec.features, BLOCK=features, NORM=int(NO_NORM), ROWS=len(states),
        num_warps=warps_for(features),
    )  # fmt: skip
    fused = prompt.products.product(rows.rows, w.fc)
    torch.mul(fused[:tokens, :width], rows.scales[:tokens, None], out=chunk.x)
    norm_rows(chunk.x, spec.norm, w.norm, None, chunk.h.rows, chunk.h.scales)
