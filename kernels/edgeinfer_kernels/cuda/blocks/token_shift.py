"""What the blocks of RWKV-7 share on a GPU: their kernels apply the norm, and read the token before."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.cuda.cache.recurrent_states import state_args, state_config
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.prefill.prefill_rows import NORMS, ScaledRows, warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, Rwkv7Config
from edgeinfer_kernels.cuda.triton_ops.rwkv7 import token_shift_chunk_kernel, token_shift_step_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock, DeviceNorms
from edgeinfer_kernels.decoder import ResidualBlock
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep


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
    step.launches.launch(
        token_shift_step_kernel,
        (tokens, lerp.numel() // width),
        step.workspace.x,
        _norm_args(residual, block.norms),
        rows,
        step.workspace.state,
        state_args(block.state),
        lerp,
        out.words,
        NET=config_of(residual, block.norms),
        CONFIG=state_config(block.state.shape),
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
