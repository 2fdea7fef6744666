"""The input of a draft head on a GPU: a token and a hidden state of its target, or the head's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.draft_input import DraftInputSpec, DraftInputWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.workspace import take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.states.own_states import OwnStates
from edgeinfer_kernels.cuda.draft.states.state_kernels import draft_pair_kernel, draft_pair_rows_kernel
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NORMS
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "draft input"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceDraftInput:
    """The projection of a pair, and the norms of its two rows."""

    eh_proj: DeviceMatrix
    enorm: Tensor
    hnorm: Tensor
    outputs: Sequence[DeviceMatrix] = ()

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.eh_proj]


def take(
    builder: DeviceBuilder, spec: DraftInputSpec, w: DraftInputWeights, shards: Sequence[Shard] = ()
) -> DeviceDraftInput:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    eh_proj, enorm, hnorm = builder.matrix(w.eh_proj), builder.vector(w.enorm), builder.vector(w.hnorm)
    assert enorm is not None
    assert hnorm is not None
    return DeviceDraftInput(eh_proj, enorm, hnorm)


def take_state(arena: Arena, spec: DraftInputSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceDraftInput) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space(OwnStates):
    """The pairs of a decode step, and the head's own states."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        (block,) = blocks
        super().__init__(arena, step.tokens, step.hidden_size, raw=block.residual.block.raw_states)
        self.pair = take_activations(arena, step.tokens, 2 * step.hidden_size, step.input_floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """x = the projection of the pairs: the first kernel sets x to zero, the second adds to it."""
    space, x, width = step.space("embedding.draft_input"), step.workspace.x, step.model.spec.hidden_size
    states = space.own if space.reads_own else step.model.states_of_target
    is_layer = block.residual.block.norm.kind == "layer"
    groups = next_power_of_two(-(-width // 16))
    step.launches.launch(
        draft_pair_kernel,
        (tokens,),
        x,
        states,
        step.workspace.state,
        *_norms(block),
        space.pair.words,
        NORM=NormConfig(width, groups, False, False, True, is_layer, False),
        ROWS=len(states),
        OWN=space.reads_own,
        OUT=space.pair.config,
        warps=8,
    )
    return step.close_block(number, block.weights.eh_proj, None, space.pair, "down", tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, of a chunk."""
    (tokens, width), states = chunk.x.shape, prompt.model.states_of_target
    size = next_power_of_two(width)
    pair = prompt.products.hidden(tokens, 2 * width)
    draft_pair_rows_kernel[(tokens,)](
        chunk.x, states, chunk.words, *_norms(block), pair.rows, pair.scales,
        WIDTH=width, BLOCK=size, NORM=int(NORMS[block.residual.block.norm.kind]), ROWS=len(states),
        num_warps=warps_for(size),
    )  # fmt: skip
    y = prompt.products.product(pair.rows, block.weights.eh_proj)
    prompt.add(chunk, number, y, None, pair.scales)


def _norms(block: "DeviceBlock | PromptBlock") -> tuple[NormArgs, NormArgs]:
    """The norms of the token's embedding and of the state."""
    w, epsilon = block.weights, block.residual.block.norm.epsilon
    return NormArgs(w.enorm, w.enorm, epsilon), NormArgs(w.hnorm, w.hnorm, epsilon)
