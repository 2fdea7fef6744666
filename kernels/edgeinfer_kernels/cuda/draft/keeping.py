"""Launches that keep hidden states after the final norm, of a target for its draft head or of a head."""

from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.draft.state_kernels import BY_POSITION, LAST, keep_states_kernel
from edgeinfer_kernels.cuda.prefill.prefill_rows import NO_NORM, NORMS, warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches


def keep_states(launches: "StepLaunches", kept: Tensor, tokens: int, place: int = BY_POSITION.value) -> None:
    """Keep the states of a step's tokens; `place`: a constant of `state_kernels.py`."""
    space, model = launches.workspace, launches.model
    norm = NextNorm(model.spec.norm, model.norm, model.norm_bias)
    launches.launch(
        keep_states_kernel,
        (1 if place == LAST.value else tokens,),
        space.x,
        space.state,
        launches.norm_args(norm),
        kept,
        **_constants(norm, kept),
        PLACE=place,
        warps=warps_for(kept.shape[1]),
    )


def keep_chunk_states(x: Tensor, words: Tensor, norm: NextNorm, kept: Tensor) -> None:
    """Keep the states x (tokens, hidden_size) of a chunk's tokens."""
    keep_states_kernel[(len(x),)](
        x, words, NormArgs(norm.weight, norm.bias, norm.spec.epsilon), kept,
        **_constants(norm, kept), PLACE=BY_POSITION.value, DEPENDENT=False,
        num_warps=warps_for(kept.shape[1]),
    )  # fmt: skip


def _constants(norm: NextNorm, kept: Tensor) -> dict[str, int]:
    rows, width = kept.shape
    return {
        "WIDTH": width,
        "BLOCK": next_power_of_two(width),
        "NORM": int(NO_NORM if norm.weight is None else NORMS[norm.spec.kind]),
        "BIAS": norm.bias is not None,
        "ROWS": rows,
    }
