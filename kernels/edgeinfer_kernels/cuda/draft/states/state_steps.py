"""The launch that makes a target's hidden states the activations of a head's projection."""

from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.draft.states.state_kernels import target_states_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep

PIECE_GROUPS = 64
"""Groups of sixteen columns of a program that only quantizes."""


def read_states(
    step: "DecodeStep", weight: Tensor | None, norm: NormSpec, out: Activations, tokens: int
) -> None:
    """out = the target's states of a step's tokens, with a norm of this weight if there is one."""
    states, has_norm = step.model.states_of_target, weight is not None
    width = states.shape[1]
    groups = -(-width // 16)
    held = next_power_of_two(groups) if has_norm else PIECE_GROUPS
    gain = step.launches.or_nothing(weight)
    step.launches.launch(
        target_states_kernel,
        (tokens, -(-groups // held)),
        states,
        step.workspace.state,
        NormArgs(gain, gain, norm.epsilon),
        out.words,
        NORM=NormConfig(width, held, False, False, has_norm, norm.kind == "layer", False),
        ROWS=len(states),
        OUT=out.config,
        warps=8 if has_norm else 4,
    )
