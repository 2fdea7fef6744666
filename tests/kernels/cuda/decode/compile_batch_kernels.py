"""Compiles the kernels of a cache with pages for a GPU that needn't be there, and prints their resources."""

import sys
from collections.abc import Sequence

import torch

from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks import attention, latent_attention
from edgeinfer_kernels.cuda.cache.layout import BATCH, PAGES
from edgeinfer_kernels.cuda.decode import latent_kernels as latent
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.flash_attention import attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs, SplitArgs, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import usual_tuning
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.sizes.cuda_buffers import STATE_WORDS
from harness.empty_decoders import empty_decoder
from tests.kernels.cuda.attention_inputs import slots_of
from tests.kernels.cuda.compile_latent_kernels import DEEPSEEK, FLOATS, GRID, WORDS, tensor

POSITIONS, TOKENS, HEAD_DIM = 4096, 64, 128
KINDS: tuple[CacheType, ...] = ("f16", "fp8", "q8_0", "q4_0", "q8_0/q4_0")
NAMES = {
    "rope_append_kernel",
    "flash_attention_kernel",
    "decode_attention_kernel",
    "combine_splits_kernel",
}


def launch_step(kind: CacheType, capability: int) -> None:
    """Attention of a batch, and of a step of one sequence in pages."""
    shape = Shape("small", 1, 8 * HEAD_DIM, 256, 8, 2, 1000, POSITIONS, head_dim=HEAD_DIM)
    spec, weights = empty_decoder(shape, "Q8_0")
    arena = Arena()
    model = DeviceModel(spec, weights, arena, POSITIONS, kv=kind)
    launches = StepLaunches(model, Workspace(model, arena), usual_tuning(capability), dependent=False)
    for layout, tokens in ((BATCH, 16), (PAGES, 1), (PAGES, 16)):
        step = DecodeStep(launches)
        step.layout = layout
        step.launch(tokens)


def launch_prompt(kind: CacheType, capability: int) -> None:
    """The kernels of a chunk in pages."""
    spec = AttentionSpec(8, 2, HEAD_DIM, HEAD_DIM**-0.5, NormSpec("rms", 1e-6), None)
    cache = attention.take_state(Arena(), spec, POSITIONS, kind, slots_of(kind, POSITIONS))
    assert cache is not None
    args = cache.args._replace(pages=tensor(POSITIONS // 16, dtype=torch.int32))
    words, queries = tensor(STATE_WORDS, dtype=torch.int32), tensor(TOKENS, 8, HEAD_DIM, dtype=torch.float16)
    heads = ProjectedHeads(tensor(TOKENS, 12 * HEAD_DIM), tensor(TOKENS))
    rope_append(heads, tensor(POSITIONS, HEAD_DIM), spec, words, queries, args)
    tile = attention_tile(HEAD_DIM, 4, capability, kind != "f16")
    flash_attention(queries, args, words, spec, tensor(TOKENS, 8 * HEAD_DIM, dtype=torch.float16), tile)


def launch_latents(kind: CacheType, capability: int) -> None:
    """Latent attention of a batch, and of a chunk in pages."""
    spec, f = DEEPSEEK, FLOATS
    cache = latent_attention.take_state(Arena(), spec, POSITIONS, kind, slots_of(kind, POSITIONS))
    config = latent_attention.latent_config(spec, cache, is_paged=True, is_batch=True)
    tensors = cache.keys, cache.key_scales, cache.values, cache.value_scales
    pages = tensor(8, POSITIONS // 16, dtype=torch.int32)
    args = CacheArgs(*tensors, POSITIONS, pages, POSITIONS // 16, cache.recent_args)
    latent.latent_rows_kernel[GRID](
        f, 1024, f, f, 1e-6, f, args, WORDS, LATENT=config, IN_STEP=True, DEPENDENT=False, num_warps=4
    )
    split = latent_attention.split_config(usual_tuning(capability), spec, POSITIONS, 16, is_batch=True)
    results = SplitArgs(f, f, WORDS)
    latent.latent_step_kernel[GRID](
        f, f, args, WORDS, 0.1, results, LATENT=config, SPLIT=split, DEPENDENT=False, num_warps=8
    )
    latent.latent_combine_kernel[GRID](
        results, WORDS, WORDS, LATENT=config, SPLIT=split, OUT=WordsConfig(16, 12), DEPENDENT=False,
        num_warps=4,
    )  # fmt: skip
    queries, ropes = (tensor(64, spec.heads, width, dtype=torch.float16) for width in (spec.latent_dim, 64))
    config = latent_attention.latent_config(spec, cache, is_paged=True)
    chunk = cache.args._replace(pages=tensor(POSITIONS // 16, dtype=torch.int32))
    tile = latent_attention.chunk_tile(config, capability)
    latent_attention.attend_chunk(queries, ropes, chunk, WORDS, spec, config, tile)


def compile_kinds(kinds: Sequence[CacheType], capability: int) -> None:
    """Compile the kernels for caches of these types, and print their resources."""
    for kind in kinds:
        with recorded_launches() as launches:
            launch_step(kind, capability)
            launch_prompt(kind, capability)
            launch_latents(kind, capability)
        for launch in launches:
            if launch.name in NAMES or launch.name.startswith("latent"):
                print(launch.name, kind, compile_launch(launch, capability), flush=True)


def main() -> None:
    compile_kinds(KINDS, int(sys.argv[1]))


if __name__ == "__main__":
    main()
