"""Compiles the kernels of recurrent blocks for a GPU that needn't be there, and prints their resources."""

import sys
from typing import Any

import torch

from edgeinfer_kernels.blocks.block import NormSpec
from edgeinfer_kernels.blocks.gated_delta_net import DELTA_POSITIONS, GatedDeltaNetSpec
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.blocks.short_convolution import ShortConvolutionSpec
from edgeinfer_kernels.cuda.blocks.gated_delta_net import CHUNK_COLUMNS, STEP_COLUMNS, net_config
from edgeinfer_kernels.cuda.cache.recurrent_states import state_config
from edgeinfer_kernels.cuda.triton_ops import gated_delta_net as net
from edgeinfer_kernels.cuda.triton_ops import short_convolution
from edgeinfer_kernels.cuda.triton_ops.activations import apply_gates_kernel
from edgeinfer_kernels.cuda.triton_ops.recurrent_rows import KEPT_COLUMNS, StateArgs, keep_rows_kernel
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORDS, FLOATS, F16 = tensor(32, dtype=torch.int32), tensor(1024), tensor(64, dtype=torch.float16)
STATE = StateArgs(tensor(64, 16), tensor(4, 16))
GRID = (1,)


def launch_delta_net() -> None:
    """All kernels of a gated delta net in the shape of Qwen3.5-9B."""
    spec = GatedDeltaNetSpec(16, 32, 128, 4, NormSpec("rms", 1e-6))
    f: Any = FLOATS
    sizes: dict[str, Any] = {"NET": net_config(spec)}
    state: dict[str, Any] = {**sizes, "CONFIG": state_config(spec.recurrent)}
    for scaled in (True, False):
        net.delta_rows_kernel[GRID](
            f, f, 1024, f, f, f,
            **sizes, BETA_AT=8192, ALPHA_AT=8224, BLOCK=1024, SCALED=scaled, DEPENDENT=False, num_warps=4,
        )  # fmt: skip
        apply_gates_kernel[GRID](
            F16 if scaled else f, f, f, 1024,
            HEAD_DIM=256, DIMENSIONS=256, SCALED=scaled, DEPENDENT=False, num_warps=1,
        )  # fmt: skip
    net.delta_convolution_kernel[GRID](
        f, WORDS, STATE, f, f, 1e-6, **state, TAPS=4, DEPENDENT=False, num_warps=1
    )
    net.delta_step_kernel[GRID](
        f, f, WORDS, STATE, f, **state, COLUMNS=STEP_COLUMNS, DEPENDENT=False, num_warps=4
    )
    net.delta_pairs_kernel[GRID](f, f, WORDS, STATE, f, **state, COUNT=DELTA_POSITIONS, num_warps=4)
    net.delta_chunk_kernel[GRID](
        f, f, WORDS, STATE, f, f, **state, COLUMNS=CHUNK_COLUMNS, COUNT=DELTA_POSITIONS, num_warps=8
    )
    net.gate_step_kernel[GRID](f, f, 1024, f, 1e-6, f, **sizes, DEPENDENT=False, num_warps=1)
    net.gate_chunk_kernel[GRID](f, f, f, 1024, f, 1e-6, F16, f, **sizes, num_warps=4)
    keep_rows_kernel[GRID](
        f, WORDS, STATE, 64, CONFIG=state["CONFIG"], BLOCK=KEPT_COLUMNS, DEPENDENT=False, num_warps=4
    )


def launch_kimi_delta_attention() -> None:
    """The kernels of a Kimi Delta Attention in the shape of Kimi-Linear-48B-A3B that differ."""
    spec, f = KimiDeltaAttentionSpec(32, 128, 4, NormSpec("rms", 1e-5)), FLOATS
    sizes: dict[str, Any] = {"NET": net_config(spec, key_decay=True)}
    state: dict[str, Any] = {**sizes, "CONFIG": state_config(spec.recurrent)}
    for scaled in (True, False):
        net.delta_rows_kernel[GRID](
            f, f, 1024, f, f, f,
            **sizes, BETA_AT=12544, ALPHA_AT=0, BLOCK=1024, SCALED=scaled, DEPENDENT=False, num_warps=4,
        )  # fmt: skip
        net.key_decay_kernel[GRID](
            f, f, 1024, f, f, f, **sizes, BLOCK=1024, SCALED=scaled, DEPENDENT=False, num_warps=4
        )
    net.low_rank_rows_kernel[GRID](f, f, 1024, F16, f, WIDTH=256, BLOCK=256, num_warps=1)
    net.delta_key_pairs_kernel[GRID](f, f, WORDS, STATE, f, **state, COUNT=DELTA_POSITIONS, num_warps=4)
    net.delta_step_kernel[GRID](
        f, f, WORDS, STATE, f, **state, COLUMNS=STEP_COLUMNS, DEPENDENT=False, num_warps=4
    )
    net.delta_chunk_kernel[GRID](
        f, f, WORDS, STATE, f, f, **state, COLUMNS=CHUNK_COLUMNS, COUNT=DELTA_POSITIONS, num_warps=8
    )
    net.gate_step_kernel[GRID](f, f, 1024, f, 1e-6, f, **sizes, DEPENDENT=False, num_warps=1)
    net.gate_chunk_kernel[GRID](f, f, f, 1024, f, 1e-6, F16, f, **sizes, num_warps=4)


def launch_short_convolution() -> None:
    """All kernels of a short convolution in the shape of LFM2-1.2B."""
    spec, f = ShortConvolutionSpec(2048, 3), FLOATS
    state = state_config(spec.recurrent)
    short_convolution.product_rows_kernel[GRID](
        f, f, 1024, f, WIDTH=2048, ROW=2048, BLOCK=256, X_AT=4096, SCALED=True, DEPENDENT=False, num_warps=4
    )
    short_convolution.step_convolution_kernel[GRID](
        f, 1024, f, WORDS, STATE, f, f,
        WIDTH=2048, BLOCK=256, TAPS=3, CONFIG=state, C_AT=2048, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    short_convolution.chunk_convolution_kernel[GRID](
        f, f, 1024, f, WORDS, STATE, f, F16, f, WIDTH=2048, BLOCK=2048, TAPS=3, CONFIG=state, num_warps=8
    )


def main() -> None:
    with recorded_launches() as launches:
        launch_delta_net()
        launch_kimi_delta_attention()
        launch_short_convolution()
    for launch in launches:
        print(launch.name, compile_launch(launch, int(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
