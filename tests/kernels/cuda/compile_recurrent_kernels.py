"""Compiles the kernels of recurrent blocks for a GPU that needn't be there, and prints their resources.

`--alone`: not as the kernels of batches and trees, which only read the place of their state from memory.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.gated_delta_net import DELTA_POSITIONS, GatedDeltaNetSpec
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.blocks.mamba import MambaSpec
from edgeinfer_kernels.blocks.mamba2 import PROMPT_CHUNK, Mamba2Spec
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.blocks.short_convolution import ShortConvolutionSpec
from edgeinfer_kernels.cuda.blocks import mamba as mamba_block
from edgeinfer_kernels.cuda.blocks import mamba2 as mamba2_block
from edgeinfer_kernels.cuda.blocks.gated_delta_net import (
    CHUNK_COLUMNS,
    KEPT_PIECE,
    STEP_COLUMNS,
    STEP_WARPS,
    net_config,
)
from edgeinfer_kernels.cuda.blocks.rwkv7_channel_mix import config_of
from edgeinfer_kernels.cuda.blocks.rwkv7_time_mix import CHUNK_COLUMNS as TIME_MIX_CHUNK_COLUMNS
from edgeinfer_kernels.cuda.blocks.rwkv7_time_mix import STEP_COLUMNS as TIME_MIX_STEP_COLUMNS
from edgeinfer_kernels.cuda.cache.recurrent_states import state_config
from edgeinfer_kernels.cuda.triton_ops.activations import apply_gates_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, WordsConfig
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import add_rows_kernel, norm_in_place_kernel
from edgeinfer_kernels.cuda.triton_ops.recurrent import delta_gates as gates
from edgeinfer_kernels.cuda.triton_ops.recurrent import gated_delta_net as net
from edgeinfer_kernels.cuda.triton_ops.recurrent import kimi_delta_attention as kimi
from edgeinfer_kernels.cuda.triton_ops.recurrent import mamba, mamba2, rwkv7, short_convolution
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import (
    KEPT_COLUMNS,
    StateArgs,
    StateConfig,
    keep_rows_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.recurrent.rwkv7 import LowRanks
from edgeinfer_kernels.cuda.tuning.targets import Launch, compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_block import DeviceNorms
from edgeinfer_kernels.decoder import ResidualBlock


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORDS, FLOATS, F16 = tensor(32, dtype=torch.int32), tensor(1024), tensor(64, dtype=torch.float16)
STATE = StateArgs(tensor(64, 16), tensor(4, 16))
GRID = (1,)


def launch_gates(sizes: dict[str, Any]) -> None:
    """The gated norm of a decode step, as activations without and with floats, and as floats."""
    for out in (WordsConfig(128, 12), WordsConfig(128, 44), None):
        gates.gate_step_kernel[GRID](
            FLOATS, FLOATS, 1024, FLOATS, 1e-6, WORDS if out else FLOATS, FLOATS, WORDS, STATE, 1,
            **sizes, BLOCK=KEPT_PIECE, OUT=out, DEPENDENT=False, num_warps=1,
        )  # fmt: skip


def launch_delta_net() -> None:
    """All kernels of a gated delta net in the shape of Qwen3.5-9B."""
    spec = GatedDeltaNetSpec(16, 32, 128, 4, NormSpec("rms", 1e-6))
    f: Any = FLOATS
    sizes: dict[str, Any] = {"NET": net_config(spec)}
    state: dict[str, Any] = {**sizes, "CONFIG": state_config(spec.recurrent)}
    for scaled in (True, False):
        net.delta_convolution_kernel[GRID](
            net.ProjectedRows(f, f, 1024), net.DecayVectors(f, f), f, WORDS, STATE, f, f, 1e-6,
            **state, BETA_AT=8192, ALPHA_AT=8224, SCALED=scaled, DEPENDENT=False, num_warps=1,
        )  # fmt: skip
        apply_gates_kernel[GRID](
            F16, f, f, 1024,
            HEAD_DIM=256, DIMENSIONS=256, GATE_AT=0 if scaled else 6144, SOFTPLUS=not scaled, num_warps=1,
        )  # fmt: skip
    net.delta_step_kernel[GRID](
        f, f, WORDS, STATE, f, **state, COLUMNS=STEP_COLUMNS, DEPENDENT=False, num_warps=STEP_WARPS
    )
    net.delta_pairs_kernel[GRID](f, f, WORDS, STATE, f, **state, COUNT=DELTA_POSITIONS, num_warps=4)
    net.delta_chunk_kernel[GRID](
        f, f, WORDS, STATE, f, f, **state, COLUMNS=CHUNK_COLUMNS, COUNT=DELTA_POSITIONS, num_warps=8
    )
    launch_gates(state)
    gates.gate_chunk_kernel[GRID](f, f, f, 1024, f, 1e-6, F16, f, **sizes, num_warps=4)
    keep_rows_kernel[GRID](
        f, WORDS, STATE, 64, CONFIG=state["CONFIG"], BLOCK=KEPT_COLUMNS, DEPENDENT=False, num_warps=4
    )


def launch_kimi_delta_attention() -> None:
    """The kernels of a Kimi Delta Attention in the shape of Kimi-Linear-48B-A3B that differ."""
    spec, f = KimiDeltaAttentionSpec(32, 128, 4, NormSpec("rms", 1e-5)), FLOATS
    sizes: dict[str, Any] = {"NET": net_config(spec, key_decay=True)}
    state: dict[str, Any] = {**sizes, "CONFIG": state_config(spec.recurrent)}
    for scaled in (True, False):
        net.delta_convolution_kernel[GRID](
            net.ProjectedRows(f, f, 1024), net.DecayVectors(f, f), f, WORDS, STATE, f, f, 1e-6,
            **state, BETA_AT=12544, ALPHA_AT=0, SCALED=scaled, DEPENDENT=False, num_warps=1,
        )  # fmt: skip
        kimi.key_decay_kernel[GRID](
            f, f, 1024, f, f, f, **sizes, BLOCK=1024, SCALED=scaled, DEPENDENT=False, num_warps=4
        )
    kimi.low_rank_rows_kernel[GRID](f, f, 1024, F16, f, WIDTH=256, BLOCK=256, num_warps=1)
    kimi.delta_key_pairs_kernel[GRID](f, f, WORDS, STATE, f, **state, COUNT=DELTA_POSITIONS, num_warps=4)
    net.delta_step_kernel[GRID](
        f, f, WORDS, STATE, f, **state, COLUMNS=STEP_COLUMNS, DEPENDENT=False, num_warps=STEP_WARPS
    )
    net.delta_chunk_kernel[GRID](
        f, f, WORDS, STATE, f, f, **state, COLUMNS=CHUNK_COLUMNS, COUNT=DELTA_POSITIONS, num_warps=8
    )
    launch_gates(state)
    gates.gate_chunk_kernel[GRID](f, f, f, 1024, f, 1e-6, F16, f, **sizes, num_warps=4)


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


def launch_mamba2() -> None:
    """The recurrence of Mamba-2 in the shape of Falcon-H1-1.5B, whose state is the largest."""
    spec, f = Mamba2Spec(48, 64, 256, 1, 4, NormSpec("rms", 1e-5)), FLOATS
    sizes: dict[str, Any] = {
        "NET": mamba2_block.net_config(spec, False, True),
        "CONFIG": state_config(spec.recurrent),
    }
    mamba2.mamba2_step_kernel[GRID](
        f, f, WORDS, STATE, f, f, f, **sizes, COLUMNS=mamba2_block.STEP_COLUMNS, DEPENDENT=False, num_warps=4
    )
    tiles: dict[str, Any] = {**sizes, "COLUMNS": mamba2_block.CHUNK_COLUMNS, "COUNT": PROMPT_CHUNK}
    piece = mamba2_block.PIECE
    for scaled in (True, False):
        mamba2.mamba2_convolution_kernel[GRID](
            f, f, 1024, f, f, WORDS, STATE, f, f, f,
            **sizes, DT_AT=4352, BLOCK=mamba2_block.CONV_BLOCK, SCALED=scaled,
            DEPENDENT=False, num_warps=2,
        )  # fmt: skip
    mamba2.mamba2_states_kernel[GRID](f, f, WORDS, STATE, f, f, **tiles, PIECE=piece, num_warps=4)
    mamba2.mamba2_chunk_kernel[GRID](f, f, WORDS, STATE, f, f, f, f, **tiles, PIECE=piece, num_warps=4)


def launch_rwkv7() -> None:
    """All kernels of RWKV-7 in the shape of the 2.9B model."""
    norm, f = NormSpec("layer", 1e-5), FLOATS
    spec, args = Rwkv7TimeMixSpec(2560, 64, (96, 96, 64, 320)), NormArgs(FLOATS, FLOATS, 1e-5)
    net = config_of(ResidualBlock(spec, norm), DeviceNorms(f, f))
    config, row = state_config(spec.recurrent), spec.recurrent.row_width
    sizes: dict[str, Any] = {"NET": net, "CONFIG": config}
    rwkv7.token_shift_step_kernel[GRID](
        f,
        args,
        f,
        WORDS,
        STATE,
        f,
        WORDS,
        **sizes,
        OUT=WordsConfig(80, 12),
        TOKENS=8,
        DEPENDENT=False,
        num_warps=4,
    )
    rwkv7.token_shift_chunk_kernel[GRID](f, args, f, WORDS, STATE, f, F16, f, **sizes, num_warps=4)
    blocks = {
        f"{name}_OUT": WordsConfig(blocks, 44) for name, blocks in zip("WAVG", (8, 8, 8, 16), strict=True)
    }
    rwkv7.low_rank_step_kernel[GRID](
        f, 320, LowRanks(*(WORDS for _ in "wavg")),
        TOKENS=8, RANKS=LowRanks(*spec.ranks), **blocks, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    for is_first in (True, False):
        rwkv7.prepare_heads_kernel[GRID](
            f, f, f, rwkv7.MixVectors(*(f for _ in range(5))),
            NET=net, ROW=row, IS_FIRST=is_first, DEPENDENT=False, num_warps=1,
        )  # fmt: skip
    rwkv7.time_mix_step_kernel[GRID](
        f, f, WORDS, STATE, f, **sizes, COLUMNS=TIME_MIX_STEP_COLUMNS, DEPENDENT=False, num_warps=4
    )
    rwkv7.time_mix_chunk_kernel[GRID](
        f, f, WORDS, STATE, f, **sizes, COLUMNS=TIME_MIX_CHUNK_COLUMNS, COUNT=rwkv7.CHUNK, num_warps=8
    )
    rwkv7.finish_heads_kernel[GRID](
        f, f, f, f, rwkv7.HeadVectors(f, f, f), 64e-5, NET=net, ROW=row, DEPENDENT=False, num_warps=1
    )
    sizes = {"WIDTH": 2560, "BLOCK": 4096, "DEPENDENT": False, "num_warps": 4}
    norm_in_place_kernel[GRID](f, args, NORM=2, BIAS=True, **sizes)
    norm_in_place_kernel[GRID](f, NormArgs(f, None, 1e-5), NORM=1, BIAS=False, **sizes)
    add_rows_kernel[GRID](f, f, 2560, BLOCK=256, DEPENDENT=False, num_warps=1)


def launch_mamba() -> None:
    """The kernels of Mamba-1 in the shape of Jamba-v0.1 that read a state."""
    spec, f = MambaSpec(8192, 16, 256, 4, NormSpec("rms", 1e-6)), FLOATS
    sizes: dict[str, Any] = {
        "NET": mamba_block.net_config(spec, True),
        "CONFIG": state_config(spec.recurrent),
    }
    mamba.mamba_convolution_kernel[GRID](
        f, f, 1024, WORDS, STATE, f, f, f, f, f,
        **sizes, Z_AT=8192, BLOCK=mamba_block.CONV_BLOCK, SCALED=False, DEPENDENT=False, num_warps=2,
    )  # fmt: skip
    channels, warps = mamba_block.scan_shape(spec)
    mamba.mamba_scan_kernel[GRID](
        mamba.ScanInputs(f, f, f, f, f), mamba.ScanStrides(8192, 16384, 288),
        mamba.MambaVectors(f, f, f, f, f), f, WORDS, STATE, f,
        **sizes, CHANNELS=channels, SCALED=False, DEPENDENT=False, num_warps=warps,
    )  # fmt: skip


IN_BATCHES = {
    "delta_convolution_kernel",
    "delta_step_kernel",
    "gate_step_kernel",
    "keep_rows_kernel",
    "step_convolution_kernel",
    "mamba_convolution_kernel",
    "mamba_scan_kernel",
    "mamba2_convolution_kernel",
    "mamba2_step_kernel",
    "token_shift_step_kernel",
    "time_mix_step_kernel",
}
"""The kernels that find the state of each sequence of a batch."""


IN_TREES = {
    "delta_convolution_kernel",
    "delta_step_kernel",
    "step_convolution_kernel",
    "mamba2_convolution_kernel",
    "mamba2_step_kernel",
    "gate_step_kernel",
    "keep_rows_kernel",
}
"""The kernels that find the state of each token of a draft tree."""


def changed(launch: Launch, **config: bool) -> Launch:
    """The launch with another `StateConfig`."""
    constants = {
        path: value._replace(**config) if isinstance(value, StateConfig) else value
        for path, value in launch.constants.items()
    }
    return replace(launch, constants=constants)


def main() -> None:
    with recorded_launches() as launches:
        launch_delta_net()
        launch_kimi_delta_attention()
        launch_short_convolution()
        launch_mamba2()
        launch_rwkv7()
        launch_mamba()
    if "--alone" in sys.argv:
        IN_BATCHES.clear()
        IN_TREES.clear()
    batches = [changed(each, is_batch=True) for each in launches if each.name in IN_BATCHES]
    trees = [changed(each, is_tree=True) for each in launches if each.name in IN_TREES]
    for launch in [*launches, *batches, *trees]:
        print(launch.name, compile_launch(launch, int(sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
