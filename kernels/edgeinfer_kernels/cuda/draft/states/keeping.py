"""Launches that keep hidden states, of a target for its draft head or of a head for its next token."""

from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.draft.states.state_kernels import BY_POSITION, LAST, keep_states_kernel
from edgeinfer_kernels.cuda.draft.states.state_ring import StateRing
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NO_NORM, NORMS
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
    from edgeinfer_kernels.cuda.weights.device_model import DeviceModel


def keep_step(launches: "StepLaunches", ring: StateRing, layers: int, tokens: int) -> None:
    """Keep the states of a step after this number of layers, if the ring has those."""
    norm = _norm(launches.model, raw=bool(ring.layers))
    for rows in ring.after(layers, launches.model.layer_count):
        _keep(launches, rows, tokens, BY_POSITION.value, norm)


def keep_chunk(model: "DeviceModel", ring: StateRing, layers: int, x: Tensor, words: Tensor) -> None:
    """As `keep_step`, of the states x (tokens, hidden_size) of a chunk."""
    norm = _norm(model, raw=bool(ring.layers))
    for rows in ring.after(layers, model.layer_count):
        keep_states_kernel[(len(x),)](
            x, words, NormArgs(norm.weight, norm.bias, norm.spec.epsilon), rows,
            **_constants(norm, rows), PLACE=BY_POSITION.value, DEPENDENT=False,
            num_warps=warps_for(rows.shape[1]),
        )  # fmt: skip


def keep_own(launches: "StepLaunches", own: Tensor, tokens: int, place: int, *, raw: bool) -> None:
    """Keep the states of a head's step; `place`: a constant of `state_kernels.py`, `raw`: without a norm."""
    _keep(launches, own, tokens, place, _norm(launches.model, raw=raw))


def _norm(model: "DeviceModel", *, raw: bool) -> NextNorm:
    if raw:
        return NextNorm(model.spec.norm, None, None)
    return NextNorm(model.spec.norm, model.norm, model.norm_bias)


def _keep(launches: "StepLaunches", kept: Tensor, tokens: int, place: int, norm: NextNorm) -> None:
    launches.launch(
        keep_states_kernel,
        (1 if place == LAST.value else tokens,),
        launches.workspace.x,
        launches.workspace.state,
        launches.norms.args(norm),
        kept,
        **_constants(norm, kept),
        PLACE=place,
        warps=warps_for(kept.shape[1]),
    )


def _constants(norm: NextNorm, kept: Tensor) -> dict[str, int]:
    rows, width = kept.shape
    return {
        "WIDTH": width,
        "BLOCK": next_power_of_two(width),
        "NORM": int(NO_NORM if norm.weight is None else NORMS[norm.spec.kind]),
        "BIAS": norm.bias is not None,
        "ROWS": rows,
        "STRIDE": kept.stride(0),
    }
