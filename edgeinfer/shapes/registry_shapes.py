"""The shapes of models of the registry, besides those that benchmarks use.

Source: the models' published configurations. Tests compare the parameters and the bytes with published ones.
"""

from dataclasses import replace
from typing import Any

from edgeinfer.shapes.encoder_layers import EncoderLayers
from edgeinfer.shapes.families import gemma4, ministral3, qwen2, qwen3, qwen35, qwen35_moe
from edgeinfer.shapes.gemma4_layers import Gemma4Layers
from edgeinfer.shapes.hybrid_layers import (
    DeltaNetLayers,
    Mamba2Layers,
    MambaLayers,
    ParallelMamba2Layers,
    ShortConvolutionLayers,
)
from edgeinfer.shapes.shape import Shape

_WINDOW = "attention.sliding_window"


def _smollm(name: str, layers: int, width: int, feed_forward: int, heads: int, kv_heads: int) -> Shape:
    return Shape(name, layers, width, feed_forward, heads, kv_heads, 49152, 8192, tied=True)


def _gemma3(
    name: str, layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, window: int = 1024
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 262144, 131072 if width > 1152 else 32768,
        head_dim=128 if layers == 62 else 256, architecture="gemma3", tied=True, rope_base=1000000.0,
        qk_norm=True, post_norms=True, keys=((_WINDOW, window),),
    )  # fmt: skip


def _mistral(name: str, feed_forward: int, context: int = 131072) -> Shape:
    return Shape(
        name, 40, 5120, feed_forward, 32, 8, 131072, context, head_dim=128, rope_base=1000000.0,
    )  # fmt: skip


def _phi(
    name: str, layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, vocabulary: int
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, vocabulary, 16384 if layers == 40 else 131072,
        architecture="phi3", tied=vocabulary > 200000, fused=True,
    )  # fmt: skip


def _olmo2(name: str, layers: int, width: int, feed_forward: int, heads: int) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, heads, 100352, 4096, architecture="olmo2",
        rope_base=500000.0, row_norms=True, post_norms=True, pre_norms=False,
    )  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Shape:
    return Shape(
        name, layers, 2880, 2880, 64, 8, 201088, 131072, head_dim=64, architecture="gpt-oss",
        rope_base=150000.0, experts=experts, experts_per_token=4, all_biases=True,
        feed_forward_norm="post_attention_norm", keys=((_WINDOW, 128),),
    )  # fmt: skip


def _lfm2(name: str, layers: int, feed_forward: int, attention: tuple[int, ...], **more: Any) -> Shape:
    shape = Shape(
        name, layers, 2048, feed_forward, 32, 8, 65536, 128000, architecture="lfm2", tied=True,
        rope_base=1000000.0, qk_norm=True, recurrent=ShortConvolutionLayers(attention, 8),
        output_norm="token_embd_norm",
    )  # fmt: skip
    return replace(shape, **more)


def _granite_h(
    name: str, width: int, neurons: int, heads: int, kv_heads: int, mamba_heads: int, pattern: str = "",
    **more: Any,
) -> Shape:  # fmt: skip
    pattern = pattern or "".join("*" if layer % 10 == 5 else "M" for layer in range(40))
    shape = Shape(
        name, len(pattern), width, neurons, heads, kv_heads, 100352, 131072, architecture="granitehybrid",
        recurrent=Mamba2Layers(pattern, mamba_heads, 64, 128, 1, kv_heads=kv_heads, is_followed=True),
        keys=(("rope.scaling.finetuned", False),), shared_gate=False, tied=True,
    )  # fmt: skip
    return replace(shape, **more)


def _falcon_h1(
    name: str, layers: int, width: int, feed_forward: int, heads: int, vocabulary: int, context: int,
    mamba_heads: int, mamba_head_dim: int,
) -> Shape:  # fmt: skip
    return Shape(
        name, layers, width, feed_forward, heads, 2, vocabulary, context, head_dim=128,
        architecture="falcon-h1", rope_base=1e11,
        recurrent=ParallelMamba2Layers("M" * layers, mamba_heads, mamba_head_dim, 256, 1),
    )  # fmt: skip


_GEMMA2 = Shape(
    "gemma-2-9b", 42, 3584, 14336, 16, 8, 256000, 8192, head_dim=256, architecture="gemma2", tied=True,
    post_norms=True, keys=((_WINDOW, 4096),),
)  # fmt: skip
_GRANITE = Shape("granite-3.3-8b", 40, 4096, 12800, 32, 8, 49159, 131072, architecture="granite", tied=True)
_QWEN3_NEXT = Shape(
    "qwen3-next-80b-a3b", 48, 2048, 512, 16, 2, 151936, 262144, head_dim=256, architecture="qwen3next",
    rope_base=10000000.0, qk_norm=True, experts=512, experts_per_token=10, shared_expert=512,
    recurrent=DeltaNetLayers(16, 32, rope_dim=64, joined=True), attention_gate=True,
    feed_forward_norm="post_attention_norm",
)  # fmt: skip
_GEMMA4_31B = gemma4(
    "gemma4-31b", 60, 5376, 21504, 32, 4, 262144, Gemma4Layers(1024, 256, 16, values_from_keys=True)
)
_GEMMA4_E2B = replace(
    _GEMMA4_31B, name="gemma4-e2b", layers=35, width=1536, feed_forward=6144, heads=8, kv_heads=1,
    context=131072,
    gemma4=Gemma4Layers(512, 256, 1, own_caches=15, per_layer=256, interval=5, doubled=True),
)  # fmt: skip
_GEMMA4_12B = replace(
    _GEMMA4_31B, name="gemma4-12b", layers=48, width=3840, feed_forward=15360, heads=16, kv_heads=1,
    gemma4=Gemma4Layers(1024, 256, 8, values_from_keys=True),
)  # fmt: skip
_GEMMA_EMBEDDING = Shape(
    "embeddinggemma-300m", 24, 768, 1152, 3, 1, 262144, 2048, head_dim=256, architecture="gemma-embedding",
    tied=True, qk_norm=True, post_norms=True, encoder=EncoderLayers(normed_sums=False, dense=3072),
    keys=((_WINDOW, 512),),
)  # fmt: skip
_NEMOTRON_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-".replace("-", "E")
_BERT: dict[str, Any] = {"tied": True, "pre_norms": False, "output_norm": ""}

REGISTRY_SHAPES = (
    _smollm("smollm2-360m", 32, 960, 2560, 15, 5),
    _smollm("smollm2-1.7b", 24, 2048, 8192, 32, 32),
    Shape("smollm3-3b", 36, 2048, 11008, 16, 4, 128256, 65536, architecture="smollm3", tied=True),
    replace(
        qwen2("deepseek-r1-1.5b", 28, 1536, 8960, 12, 2, tied=False), vocabulary=151936, context=131072
    ),
    qwen2("qwen2.5-14b", 48, 5120, 13824, 40, 8, tied=False),
    qwen2("qwen2.5-32b", 64, 5120, 27648, 40, 8, tied=False),
    qwen3("qwen3-1.7b", 28, 2048, 6144, 16, tied=True),
    qwen3("qwen3-8b", 36, 4096, 12288, 32, tied=False),
    qwen3("qwen3-embedding-8b", 36, 4096, 12288, 32, tied=True),
    qwen3("qwen3-14b", 40, 5120, 17408, 40, tied=False),
    qwen3("qwen3-32b", 64, 5120, 25600, 64, tied=False),
    Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128256, 131072, rope_base=500000.0),
    Shape("llama-3.3-70b", 80, 8192, 28672, 64, 8, 128256, 131072, rope_base=500000.0),
    _GEMMA2,
    _gemma3("gemma-3-1b", 26, 1152, 6912, 4, 1, 512),
    _gemma3("gemma-3-4b", 34, 2560, 10240, 8, 4),
    _gemma3("gemma-3-12b", 48, 3840, 15360, 16, 8),
    _gemma3("gemma-3-27b", 62, 5376, 21504, 32, 16),
    _mistral("mistral-nemo-12b", 14336),
    ministral3("ministral-3-3b", 26, 3072, 9216, tied=True),
    ministral3("ministral-3-14b", 40, 5120, 16384),
    _mistral("mistral-small-24b", 32768),
    _phi("phi-3.5-mini", 32, 3072, 8192, 32, 32, 32064),
    _phi("phi-4-mini", 32, 3072, 8192, 24, 8, 200064),
    _phi("phi-4", 40, 5120, 17920, 40, 10, 100352),
    _olmo2("olmo-2-1b", 16, 2048, 8192, 16),
    _olmo2("olmo-2-7b", 32, 4096, 11008, 32),
    replace(_GRANITE, name="granite-4.0-micro", width=2560, feed_forward=8192, heads=40, vocabulary=100352),
    Shape(
        "granite-3.1-3b-a800m", 32, 1536, 512, 24, 8, 49155, 131072, architecture="granitemoe", tied=True,
        experts=40, experts_per_token=8,
    ),
    _GRANITE,
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    qwen35("qwen3.5-2b", 24, 2048, 6144, 8, 2, 16, tied=True),
    qwen35("qwen3.5-27b", 64, 5120, 17408, 24, 4, 48, tied=False),
    qwen35_moe("qwen3.5-122b-a10b", 48, 3072, 1024, 32, 64),
    _QWEN3_NEXT,
    _lfm2(
        "lfm2-8b-a1b", 24, 1792, (2, 6, 10, 14, 18, 21), architecture="lfm2moe", experts=32,
        experts_per_token=4, expert_bias=True, dense_layers=2, dense_feed_forward=7168,
    ),
    _granite_h(
        "granite-4.0-h-tiny", 1536, 512, 12, 4, 48, experts=64, experts_per_token=6, shared_expert=1024
    ),
    _granite_h("granite-4.0-h-1b", 1536, 4096, 12, 4, 48),
    _granite_h(
        "granite-4.0-h-350m", 768, 2048, 12, 4, 24, "MMMMMMMMMM*MM*MMM*MMMMMMMMM*MMMM", context=32768
    ),
    _falcon_h1("falcon-h1-1.5b", 24, 2048, 4608, 8, 65537, 131072, 48, 64),
    _falcon_h1("falcon-h1-7b", 44, 3072, 12288, 12, 130048, 262144, 24, 128),
    Shape(
        "nemotron-3-nano-4b", 42, 3136, 12544, 40, 8, 131072, 262144, head_dim=128,
        architecture="nemotron_h", gated=False, feed_forward_norm="",
        recurrent=Mamba2Layers(_NEMOTRON_4B, 96, 80, 128, 8, kv_heads=8, feed_forward=12544),
    ),
    Shape(
        "jamba-reasoning-3b", 28, 2560, 8192, 20, 1, 65536, 262144, head_dim=128, architecture="jamba",
        recurrent=MambaLayers((7, 21), 5120, 16, 160, 1),
    ),
    Shape(
        "muse-glimmer-30b", 52, 6656, 19968, 32, 2, 202048, 131072, head_dim=128, architecture="muse-glimmer",
        qk_norm=True, post_norms=True, attention_gate=True,
        keys=((_WINDOW, 2048), ("final_logit_softcapping", 20.0)),
    ),
    _lfm2("lfm2.5-2.6b", 30, 10752, (2, 5, 9, 13, 17, 21, 24, 27), vocabulary=128000),
    _granite_h(
        "granite-4.0-h-small", 4096, 768, 32, 8, 128, experts=72, experts_per_token=10, shared_expert=1536
    ),
    Shape(
        "mamba-codestral-7b", 64, 4096, 0, 0, 0, 32768, 262144, architecture="mamba2",
        recurrent=Mamba2Layers("M" * 64, 128, 64, 128, 8), feed_forward_norm="",
    ),
    _GEMMA4_E2B,
    _GEMMA4_12B,
    _GEMMA4_31B,
    _GEMMA_EMBEDDING,
    Shape(
        "nomic-embed-text-v1.5", 12, 768, 3072, 12, 12, 30522, 2048, architecture="nomic-bert", fused=True,
        encoder=EncoderLayers(types=2), **_BERT,
    ),
    Shape(
        "bge-reranker-v2-m3", 24, 1024, 4096, 16, 16, 250002, 8192, architecture="bert", gated=False,
        all_biases=True, encoder=EncoderLayers(positions=8192, types=1, scores=True), **_BERT,
    ),
)  # fmt: skip
