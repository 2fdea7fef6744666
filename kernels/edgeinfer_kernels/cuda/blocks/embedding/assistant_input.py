"""The input of a Gemma 4 assistant on a GPU: a token, and a hidden state of its target or the assistant's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec, AssistantInputWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.assistant_kernels import assistant_pair_kernel
from edgeinfer_kernels.cuda.draft.states.own_states import OwnStates
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep

PART = "draft input"
"""The name of the weights in lists of device memory."""
KIND = "embedding.assistant_input"
EMBEDS = True
"""It reads the embedding, which is that of the target, instead of x."""


@dataclass(frozen=True)
class DeviceAssistantInput:
    """W_pre and W_post."""

    pre: DeviceMatrix
    post: DeviceMatrix
    outputs: Sequence[DeviceMatrix] = ()

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.pre, self.post]


def take(
    builder: DeviceBuilder, spec: AssistantInputSpec, w: AssistantInputWeights, shards: Sequence[Shard] = ()
) -> DeviceAssistantInput:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    return DeviceAssistantInput(builder.matrix(w.pre), builder.matrix(w.post))


def take_state(arena: Arena, spec: AssistantInputSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceAssistantInput) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space(OwnStates):
    """The pair of a step, which has one token; the assistant's own state, and its projection."""

    stays = True

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        super().__init__(arena, 1, step.hidden_size, raw=False)
        (block,) = blocks
        width = block.residual.block.target_width
        self.own_words = take_activations(arena, 1, step.hidden_size, step.input_floats)
        self.projected = arena.take((1, padded_rows(width)), torch.float32)
        self.pair = take_activations(arena, 1, 2 * width, step.input_floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """x = the projection of the pair: a kernel sets x to zero, and the last one adds to it."""
    space, w, model = step.space(KIND), block.weights, step.model
    width, own_width = block.residual.block.target_width, model.spec.hidden_size
    states = model.states_of_target
    if space.reads_own:
        states = space.projected
        step.launches.norms.quantize(space.own, own_width, space.own_words, tokens)
        read = Source(space.own_words, source.sum_squares)
        step.launches.rows((w.post,), read, states, None, "down", tokens)
    step.launches.launch(
        assistant_pair_kernel,
        (-(-max(width, own_width) // 256), tokens),
        model.embedding.parts,
        step.workspace.x,
        states,
        step.workspace.state,
        model.spec.embedding_scale,
        space.pair.words,
        WIDTH=width,
        OWN_WIDTH=own_width,
        IN_BLOCKS=model.embedding.shapes.blocks,
        ROWS=len(states),
        OWN=space.reads_own,
        OUT=space.pair.config,
        TILE=model.embedding.shapes.tile,
        warps=1,
    )
    return step.close_block(number, w.pre, None, space.pair, "down", tokens)
