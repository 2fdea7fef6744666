"""Compiles the kernels of an encoder's texts for a GPU that needn't be there, and prints their resources."""

import sys

import torch

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.encoder_attention import EncoderAttentionSpec
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.prefill.text_attention import ProjectedTexts, add_position_rows, text_attention
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs
from edgeinfer_kernels.cuda.tuning.targets import Launch, compile_launch, recorded_launches
from edgeinfer_kernels.sizes.cuda_buffers import STATE_WORDS

TOKENS, CHUNK = 64, 512
NORM = NormSpec("layer", 1e-12)
CASES = (
    EncoderAttentionSpec(12, 12, 64, 0.125, NORM, None),
    EncoderAttentionSpec(12, 12, 64, 0.125, NORM, None, window=128),
    EncoderAttentionSpec(8, 8, 64, 0.125, NORM, None, alibi=True),
    EncoderAttentionSpec(3, 1, 256, 0.0625, NormSpec("rms", 1e-6), None, window=512),
)
"""BERT, ModernBERT, Jina, and EmbeddingGemma."""


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(spec: EncoderAttentionSpec) -> None:
    """The kernels of one step."""
    heads, cached, dim = spec.heads, spec.kv_heads, spec.head_dim
    keys, values = (tensor(cached, CHUNK, dim, dtype=torch.float16) for _ in range(2))
    queries = tensor(TOKENS, heads, dim, dtype=torch.float16)
    words, positions = tensor(STATE_WORDS, dtype=torch.int32), tensor(TOKENS, dtype=torch.int32)
    projected = ProjectedHeads(tensor(TOKENS, (heads + 2 * cached) * dim), tensor(TOKENS))
    cache = CacheArgs(keys, None, values, None, CHUNK)
    rope_append(projected, tensor(CHUNK, dim), spec.projections, words, queries, cache, positions=positions)
    slopes = tensor(heads) if spec.alibi else None
    out, tiles = tensor(TOKENS, heads * dim, dtype=torch.float16), tensor(TOKENS, 3, dtype=torch.int32)
    text_attention(ProjectedTexts(queries, keys, values), tiles, spec, slopes, out)
    add_position_rows(tensor(TOKENS, heads * dim), tensor(CHUNK * heads * dim), positions)


def launches_of(spec: EncoderAttentionSpec) -> list[Launch]:
    with recorded_launches() as launches:
        launch(spec)
    return list(launches)


def main() -> None:
    capability = int(sys.argv[1])
    for spec in CASES:
        for each in launches_of(spec):
            print(each.name, spec.head_dim, compile_launch(each, capability), flush=True)


if __name__ == "__main__":
    main()
