"""Compiles the kernels of latent attention for a GPU that needn't be there, and prints their resources."""

import sys
from typing import Any

import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.latent_attention import (
    attend_chunk,
    chunk_tile,
    latent_config,
    split_config,
    take_state,
)
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode import latent_kernels as latent
from edgeinfer_kernels.cuda.decode.gemv_kernels import head_rows_kernel
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.flash_attention import transform_heads
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs, GemvConfig, SplitArgs, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache

POSITIONS = 4096
KINDS: tuple[CacheType, ...] = ("f16", "q8_0", "q4_0")
GRID = (1,)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


WORDS, FLOATS, F16 = tensor(32, dtype=torch.int32), tensor(1024), tensor(64, dtype=torch.float16)
KIMI = LatentAttentionSpec(32, 128, 64, 128, 512, 192**-0.5, NormSpec("rms", 1e-5), None)
DEEPSEEK = LatentAttentionSpec(
    16, 128, 64, 128, 512, 192**-0.5, NormSpec("rms", 1e-6), RopeSpec((1.0,) * 32, neox=False)
)


def launch_attention(spec: LatentAttentionSpec, kind: CacheType, capability: int) -> None:
    """All kernels of a block but the matrix products."""
    cache = take_state(Arena(), spec, POSITIONS, kind)
    config, f, nothing = latent_config(spec, cache), FLOATS, WORDS
    args = CacheArgs(cache.keys, cache.key_scales, cache.values, cache.value_scales, POSITIONS)
    out = WordsConfig(16, 12)
    for in_step in (True, False):
        both: dict[str, Any] = {"LATENT": config, "IN_STEP": in_step, "DEPENDENT": False}
        own = args if in_step else cache.args
        latent.latent_rows_kernel[GRID](f, 1024, f, f, 1e-6, f, own, WORDS, **both, num_warps=4)
        rows = (nothing, f) if in_step else (F16, F16)
        layout = out if in_step else None
        latent.latent_queries_kernel[GRID](f, 1024, f, f, *rows, WORDS, **both, OUT=layout, num_warps=1)
    for tokens in (1, 8):
        split = split_config(usual_tuning(capability), spec, POSITIONS, tokens)
        results = SplitArgs(f, f, nothing)
        step: dict[str, Any] = {"LATENT": config, "SPLIT": split, "DEPENDENT": False}
        latent.latent_step_kernel[GRID](f, f, args, WORDS, 0.1, results, **step, num_warps=8)
        latent.latent_combine_kernel[GRID](results, WORDS, nothing, **step, OUT=out, num_warps=4)
    queries = tensor(64, spec.heads, spec.latent_dim, dtype=torch.float16)
    ropes = tensor(64, spec.heads, spec.rope_dim, dtype=torch.float16)
    attend_chunk(queries, ropes, cache.args, WORDS, spec, config, chunk_tile(config, capability))
    if kind == "q4_0":
        transform_heads(queries)
        transform_heads(ropes)


def launch_shift(kind: CacheType) -> None:
    """The kernel of context shift: the elements with RoPE are its keys."""
    cache = take_state(Arena(), DEEPSEEK, POSITIONS, kind)
    turned = DeviceCache(cache.values, cache.value_scales, cache.keys, cache.key_scales)
    shift_context(
        turned, FLOATS, ShiftedHeads(DEEPSEEK.rope_dim, DEEPSEEK.latent_dim, True), 4, 1024, POSITIONS
    )


def launch_products(spec: LatentAttentionSpec) -> None:
    """The products of each head's rows with its activations."""
    for name in ("Q8_0", "F16"):
        matrix = Arena().matrix("attn_k_b", name, spec.heads * spec.latent_dim, spec.nope_dim)
        blocks = matrix.shapes.blocks
        read = WordsConfig(blocks, 12 if name == "Q8_0" else 44)
        for tokens, out in ((1, WordsConfig(0, 0)), (8, read)):
            head_rows_kernel[GRID](
                matrix.parts, WORDS, FLOATS if out.blocks == 0 else WORDS, 1024,
                HEAD_ROWS=spec.latent_dim, HEADS=spec.heads, READ=read, OUT=out,
                GEMV=GemvConfig(min(blocks, 32), 1, tokens), TILE=matrix.shapes.tile, DEPENDENT=False,
                num_warps=2,
            )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    with recorded_launches() as launches:
        for kind in KINDS:
            launch_attention(KIMI, kind, capability)
            launch_shift(kind)
        launch_attention(DEEPSEEK, "f16", capability)
        launch_products(KIMI)
    for launch in launches:
        print(launch.name, compile_launch(launch, capability), flush=True)


if __name__ == "__main__":
    main()
