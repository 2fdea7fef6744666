"""Compiles the kernels of Gemma 4's blocks and of gated attention for a GPU that needn't be there, and prints
their resources.
"""

import sys
from dataclasses import replace
from typing import Any

import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.attention import (
    attention_config,
    attention_warps,
    split_config,
    take_state,
)
from edgeinfer_kernels.cuda.blocks.common.attention_splits import combine_splits_kernel
from edgeinfer_kernels.cuda.decode.decode_attention import decode_attention_kernel
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.exchange_kernels import receive_sum_kernel
from edgeinfer_kernels.cuda.prefill.expert_kernels import select_experts_kernel
from edgeinfer_kernels.cuda.prefill.flash_attention import attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.triton_ops import layer_output_kernels as output
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    CacheArgs,
    NormArgs,
    NormConfig,
    RopeArgs,
    SplitArgs,
    WordsConfig,
)
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import add_norm_kernel
from edgeinfer_kernels.cuda.triton_ops.raw_rows import raw_config
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches

POSITIONS = 4096
KINDS: tuple[CacheType, ...] = ("f16", "q8_0", "q4_0")
GRID = (1,)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORDS, FLOATS = tensor(32, dtype=torch.int32), tensor(1024)
WINDOWED = AttentionSpec(
    8, 2, 256, 1.0, NormSpec("rms", 1e-6), RopeSpec((1.0,) * 128, neox=True), "head", 512, value_norm=True
)
GATED = replace(WINDOWED, heads=16, kv_heads=4, window=0, value_norm=False, gated=True)
"""The attention of Qwen3.5-4B."""
WHOLE = replace(WINDOWED, head_dim=512, window=0, rope=RopeSpec((1.0,) * 256, neox=True))


def launch_attention(spec: AttentionSpec, kind: CacheType, capability: int) -> None:
    """The kernels of an attention block with a cache."""
    cache = take_state(Arena(), replace(spec, source_layer=None), POSITIONS, kind)
    assert cache is not None
    args = CacheArgs(cache.keys, cache.key_scales, cache.values, cache.value_scales, POSITIONS)
    f, tuning = FLOATS, usual_tuning(capability)
    group, quantized = spec.heads // spec.kv_heads, kind != "f16"
    tile = attention_tile(spec.head_dim, group, capability, quantized)
    for tokens in (1, 8):
        split = split_config(tuning, spec, POSITIONS, tokens)
        results, config = SplitArgs(f, f, WORDS), attention_config(spec, cache, has_sinks=spec.sinks)
        sizes: dict[str, Any] = {"ATTENTION": config, "SPLIT": split, "OUT": WordsConfig(128, 12)}
        decode_attention_kernel[GRID](
            f, 8192, args, WORDS, RopeArgs(f, f, f, f, 1e-6), 1.0, 0.0, results, WORDS, f, f,
            **sizes, DIRECT=True, DEPENDENT=False, num_warps=attention_warps(tuning, spec, split),
        )  # fmt: skip
        if not split.combines:
            combine_splits_kernel[GRID](
                WORDS, results, WORDS, f, f, f, 8192, **sizes, DIRECT=True, DEPENDENT=False, num_warps=1
            )
    columns = spec.heads * spec.head_dim
    if spec.source_layer is None:
        columns += spec.kv_heads * (spec.head_dim + spec.value_dim)
    queries = tensor(64, spec.heads, spec.head_dim, dtype=torch.float16)
    heads = ProjectedHeads(tensor(64, columns), FLOATS, None, f, f, None)
    rope_append(heads, f, spec, WORDS, queries, cache.args, cache.is_ring)
    out, sinks = tensor(64, spec.result_columns, dtype=torch.float16), FLOATS if spec.sinks else None
    flash_attention(queries, cache.args, WORDS, spec, out, tile, sinks, cache.is_ring)


def launch_layer_output() -> None:
    """The kernels of layer outputs, of a dense feed-forward's norms, and expert selection with scales."""
    f, norm = FLOATS, NormArgs(FLOATS, FLOATS, 1e-6)
    number = tensor(1, dtype=torch.int64)
    for scaled in (False, True):
        both: dict[str, Any] = {"SCALED": scaled, "DEPENDENT": False}
        narrow, wide = {"WIDTH": 256, "BLOCK": 256} | both, {"WIDTH": 2560, "BLOCK": 4096} | both
        for name in (None, "F16", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"):
            raw = None if name is None else raw_config(name, 1024)
            rows = f if raw is None else tensor(1024, dtype=torch.uint8)
            output.per_layer_inputs_kernel[GRID](
                f,
                1024,
                f,
                rows,
                WORDS,
                number,
                norm,
                f,
                0.02,
                16.0,
                **narrow,
                RAW=raw,
                ROWS=output.SENT if scaled else output.TABLE if name == "Q4_0" else output.AWAITED,
                num_warps=1,
            )
        out, config = (None, None) if scaled else (WORDS, WordsConfig(8, 12))
        output.gate_inputs_kernel[GRID](
            f, 256, f, f, 1024, out, **narrow, ACTIVATION=1, OUT=config, num_warps=1
        )
        output.add_normed_kernel[GRID](f, 2560, f, 2560, f, norm, norm, **wide, num_warps=4)
    wide = {"WIDTH": 2560, "BLOCK": 4096, "DEPENDENT": False}
    output.finish_layer_kernel[GRID](f, f, 2560, f, norm, 0.5, **wide, ADDS=True, num_warps=4)
    no_norm = NormArgs(None, None, 1e-6)
    output.finish_layer_kernel[GRID](f, f, 2560, None, no_norm, 0.5, **wide, ADDS=False, num_warps=4)
    for adds in (False, True):
        add_norm_kernel[GRID](
            f, 2560, f, 1.0, 0.5, norm, norm, WORDS,
            NORM=NormConfig(2560, 256, adds, adds, True, False, False, scales=True),
            OUT=WordsConfig(80, 12), DEPENDENT=False, num_warps=8,
        )  # fmt: skip
    receive_sum_kernel[GRID](
        number, number, 1, WORDS, f, f, 2816, WIDTH=2816, STRIDE=2816, DEPENDENT=False, num_warps=8
    )
    select_experts_kernel[GRID](
        f, 128, WORDS, f, f, f, 1.0, COUNT=128, EXPERTS_PER_TOKEN=8, GATING=0, NORMALIZED=True,
        BIASED=False, SCALED=True, GROUPS=1, GROUPS_PER_TOKEN=1, DEPENDENT=False, num_warps=1,
    )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    with recorded_launches() as launches:
        launch_layer_output()
        for kind in KINDS:
            for spec in (WINDOWED, WHOLE):
                launch_attention(spec, kind, capability)
                launch_attention(replace(spec, source_layer=0), kind, capability)
            launch_attention(GATED, kind, capability)
    for launch in {launch.key: launch for launch in launches}.values():
        print(launch.name, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
