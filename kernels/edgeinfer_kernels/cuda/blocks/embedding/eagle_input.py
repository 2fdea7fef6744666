"""The input of an EAGLE-3 head on a GPU: a token, and hidden states of its target or the head's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.eagle_input import EagleInputSpec, EagleInputWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.eagle_kernels import (
    eagle_pair_kernel,
    eagle_pair_rows_kernel,
    eagle_state_rows_kernel,
)
from edgeinfer_kernels.cuda.draft.states.own_states import OwnStates
from edgeinfer_kernels.cuda.draft.states.state_steps import read_states
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NO_NORM, NORMS
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
KIND = "embedding.eagle_input"


@dataclass(frozen=True)
class DeviceEagleInput:
    """The projection of the target's states, and the norms of the embedding, of g and of these states."""

    fc: DeviceMatrix
    enorm: Tensor
    hnorm: Tensor
    feature_norm: Tensor | None
    outputs: Sequence[DeviceMatrix] = ()

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.fc]


def take(
    builder: DeviceBuilder, spec: EagleInputSpec, w: EagleInputWeights, shards: Sequence[Shard] = ()
) -> DeviceEagleInput:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    fc, enorm, hnorm = builder.matrix(w.fc), builder.vector(w.enorm), builder.vector(w.hnorm)
    assert enorm is not None
    assert hnorm is not None
    return DeviceEagleInput(fc, enorm, hnorm, builder.vector(w.feature_norm))


def take_state(arena: Arena, spec: EagleInputSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceEagleInput) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space(OwnStates):
    """The target's states in a decode step, their projections g, and the pairs that attention reads; also
    the head's own states, which are x after its layer.
    """

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        super().__init__(arena, step.tokens, step.hidden_size, raw=True)
        (block,) = blocks
        self.states = take_activations(arena, step.tokens, block.residual.block.features, step.input_floats)
        self.fused = arena.take((step.tokens, padded_rows(step.hidden_size)), torch.float32)
        self.pair = take_activations(arena, step.tokens, 2 * step.hidden_size, step.input_floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """x = g, or its norm, and the pairs."""
    space, w, spec = step.space(KIND), block.weights, block.residual.block
    if not space.reads_own:
        _fuse(step, block, source, tokens)
    states = space.own if space.reads_own else space.fused
    width = step.model.spec.hidden_size
    epsilon, is_layer = spec.norm.epsilon, spec.norm.kind == "layer"
    groups = next_power_of_two(-(-width // 16))
    step.launches.launch(
        eagle_pair_kernel,
        (tokens,),
        step.workspace.x,
        states,
        step.workspace.state,
        NormArgs(w.enorm, w.enorm, epsilon),
        NormArgs(w.hnorm, w.hnorm, epsilon),
        space.pair.words,
        NORM=NormConfig(width, groups, False, False, True, is_layer, False),
        STRIDE=states.stride(0),
        OWN=space.reads_own,
        NORMED_RESIDUAL=spec.norm_before_residual,
        OUT=space.pair.config,
        warps=8,
    )
    return step_pairs(step)


def _fuse(step: "DecodeStep", block: DeviceBlock, source: Source, tokens: int) -> None:
    """g = W_fc times the target's states."""
    space, w, spec = step.space(KIND), block.weights, block.residual.block
    read_states(step, w.feature_norm, spec.norm, space.states, tokens)
    read = Source(space.states, source.sum_squares)
    step.launches.rows((w.fc,), read, space.fused, None, "down", tokens)


def step_pairs(step: "DecodeStep") -> Source:
    """What attention reads in a step."""
    return Source(step.space(KIND).pair, step.workspace.sum_squares[0])


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, of a chunk."""
    (tokens, width), states = chunk.x.shape, prompt.model.states_of_target
    spec, w = block.residual.block, block.weights
    epsilon, kind = spec.norm.epsilon, int(NORMS[spec.norm.kind])
    size, features = next_power_of_two(width), next_power_of_two(spec.features)
    rows = prompt.products.hidden(tokens, spec.features)
    eagle_state_rows_kernel[(tokens,)](
        states, chunk.words, NormArgs(w.feature_norm, None, epsilon), rows.rows, rows.scales,
        WIDTH=spec.features, BLOCK=features, NORM=int(NO_NORM) if w.feature_norm is None else kind,
        ROWS=len(states), num_warps=warps_for(features),
    )  # fmt: skip
    fused, pair = prompt.products.product(rows.rows, w.fc), chunk_pairs(prompt, chunk)
    eagle_pair_rows_kernel[(tokens,)](
        chunk.x, fused, rows.scales, NormArgs(w.enorm, None, epsilon), NormArgs(w.hnorm, None, epsilon),
        pair.rows, pair.scales, WIDTH=width, BLOCK=size, NORM=kind,
        NORMED_RESIDUAL=spec.norm_before_residual, num_warps=warps_for(size),
    )  # fmt: skip


def chunk_pairs(prompt: "Prefill", chunk: "Chunk") -> ScaledRows:
    """What attention reads of a chunk: the hidden rows, until those of another block follow."""
    tokens, width = chunk.x.shape
    return prompt.products.hidden(tokens, 2 * width)
