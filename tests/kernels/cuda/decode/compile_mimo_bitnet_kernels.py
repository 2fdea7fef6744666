"""Compiles the kernels of MiMo-V2's attention, whose values are shorter than its keys, and of BitNet's norms
before the last projections for a GPU that needn't be there, and prints their resources.
"""

import sys
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.attention import take_state
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, activation_norm_rows, norm_rows
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig, WordsConfig
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import activation_norm_kernel
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from tests.kernels.cuda.decode.compile_gemma_kernels import (
    FLOATS,
    GRID,
    KINDS,
    POSITIONS,
    WORDS,
    launch_attention,
    tensor,
)

WHOLE = AttentionSpec(
    64, 4, 192, 192**-0.5, NormSpec("rms", 1e-5), RopeSpec((1.0,) * 32, neox=True), value_length=128
)
"""The heads of MiMo-V2."""
WINDOWED = replace(WHOLE, kv_heads=8, window=128, sinks=True)


def launch_shift(spec: AttentionSpec, kind: CacheType) -> None:
    """The kernel of context shift."""
    cache = take_state(Arena(), spec, POSITIONS, kind)
    assert cache is not None
    heads = ShiftedHeads(spec.head_dim, spec.value_dim, has_rope=True)
    shift_context(cache, FLOATS, heads, 4, 1024, POSITIONS)


def launch_norms() -> None:
    """The kernels of a feed-forward whose neurons are normalized, and the norm of the heads' results."""
    f, norm, silu, neurons = FLOATS, NormArgs(FLOATS, FLOATS, 1e-5), activation_code("silu"), 6912
    constants: dict[str, Any] = {"OUT": WordsConfig(216, 12), "DEPENDENT": False, "num_warps": 8}
    activation_norm_kernel[GRID](
        f, 2 * neurons, neurons, f, f, 1.5, 2.0, norm, WORDS,
        NORM=NormConfig(neurons, 512, False, False, True, False, False),
        ACTIVATION=silu, HAS_GATE=True, HAS_BIAS=False, **constants,
    )  # fmt: skip
    heads = tensor(64, 2560, dtype=torch.float16)
    norm_rows(heads, NormSpec("rms", 1e-5), f, None, heads, f)
    up, inner = tensor(64, neurons), ScaledRows(tensor(64, neurons, dtype=torch.float16), f)
    activation_norm_rows(up, up, None, None, f, "silu", NextNorm(NormSpec("rms", 1e-5), f, None), inner)


def main() -> None:
    capability = int(sys.argv[1])
    with recorded_launches() as launches:
        launch_norms()
    for launch in launches:
        print(launch.name, compile_launch(launch, capability), flush=True)
    for kind, spec in zip(KINDS, cycle((WHOLE, WINDOWED)), strict=False):
        with recorded_launches() as launches:
            launch_attention(spec, kind, capability)
            launch_shift(spec, kind)
        for launch in launches:
            print(launch.name, kind, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
