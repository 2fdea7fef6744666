"""Compiles the kernels of Gemma 3n's blocks for a GPU that needn't be there, and prints their resources."""

import sys
from typing import Any

import torch

from edgeinfer_kernels.cuda.blocks.gemma3n import gaussian_feed_forward, laurel
from edgeinfer_kernels.cuda.blocks.gemma3n.altup_predict import PIECE, row_warps, streams_config
from edgeinfer_kernels.cuda.triton_ops.gemma3n import altup
from edgeinfer_kernels.cuda.triton_ops.gemma3n.altup import RouterArgs
from edgeinfer_kernels.cuda.triton_ops.gemma3n.gaussian_feed_forward import (
    gaussian_hidden_kernel,
    gaussian_rows_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.gemma3n.rows import laurel_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InputArgs, NormArgs, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches

GRID = (1,)
WIDTH, NEURONS = 2048, (8192, 16384)
"""Elements of hidden states, and neurons of E2B and E4B."""
GELU = 1


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


F, F16, WORDS = tensor(1024), tensor(1024, dtype=torch.float16), tensor(32, dtype=torch.int32)
NORM = NormArgs(F, F, 1e-6)


def launch_options(out: WordsConfig | None, capability: int) -> dict[str, Any]:
    """Dependent launch in steps, where a GPU has it."""
    return {"DEPENDENT": True, "launch_pdl": True} if out and capability >= 90 else {"DEPENDENT": False}


def launch_altup(out: WordsConfig | None, capability: int) -> None:
    """The kernels of AltUp with `out` as the layout of a step's activations; None: those of a prompt."""
    streams, router = tensor(5, 512, WIDTH), RouterArgs(F, F, 1e-6)
    config, stride = streams_config(streams), streams.stride(0)
    options = {"STREAMS": config, "num_warps": row_warps(config), **launch_options(out, capability)}
    following = InputArgs(None, None, None) if out is None else InputArgs(WORDS, F, F)
    altup.altup_predict_kernel[GRID](
        streams, stride, F, router, following, GAIN=out is not None, OUT=out, **options
    )
    written = F if out is None else WORDS
    altup.altup_correct_kernel[GRID](streams, stride, F, router, F, written, OUT=out, **options)
    altup.altup_add_kernel[GRID](F, WIDTH, F, streams, stride, NORM, SCALED=out is None, **options)
    altup.altup_expand_kernel[GRID](F, F, 3 * WIDTH, streams, stride, **options)
    altup.altup_merge_kernel[GRID](streams, F, 3 * WIDTH, F, **options)


def launch_laurel(out: WordsConfig | None, capability: int) -> None:
    """As `launch_altup`, for Laurel's sum."""
    following = InputArgs(None, None, None) if out is None else InputArgs(WORDS, F, F)
    laurel_kernel[GRID](
        F, F, NORM, F, WIDTH, F, NORM, 0.5, following, WIDTH=WIDTH, BLOCK=WIDTH, PIECE=PIECE,
        SCALED=out is None, GAIN=out is not None, OUT=out, num_warps=laurel.WARPS,
        **launch_options(out, capability),
    )  # fmt: skip


def launch_gaussian(neurons: int, capability: int) -> None:
    """The kernels of a feed-forward with few active neurons."""
    shape = {"NEURONS": neurons, "BLOCK": next_power_of_two(neurons), "ACTIVATION": GELU}
    warps = gaussian_feed_forward.WARPS
    for out in (WordsConfig(neurons // 32, planes) for planes in (12, 44)):
        gaussian_hidden_kernel[GRID](
            F, F, 2 * neurons, 1.6, WORDS, **shape, PIECE=gaussian_feed_forward.STEP_PIECE,
            OUT=out, num_warps=warps, **launch_options(out, capability),
        )  # fmt: skip
    gaussian_rows_kernel[GRID](
        F, F, F, 1.6, F16, F, **shape, PIECE=gaussian_feed_forward.PROMPT_PIECE, num_warps=warps
    )


def main() -> None:
    capability = int(sys.argv[1])
    with recorded_launches() as launches:
        for out in (None, WordsConfig(WIDTH // 32, 12), WordsConfig(WIDTH // 32, 44)):
            launch_altup(out, capability)
            launch_laurel(out, capability)
        for neurons in NEURONS:
            launch_gaussian(neurons, capability)
    for launch in {launch.key: launch for launch in launches}.values():
        print(launch.name, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
