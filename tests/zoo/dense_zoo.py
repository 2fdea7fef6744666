"""The random models of the tests: dense models of further families."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tests.random_models import RandomModel

QKV = ("attn_q", "attn_k", "attn_v")
FUSED_BIASES = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


def long_factors(end: float) -> npt.NDArray[np.float32]:
    return np.linspace(1.0, end, 8, dtype=np.float32)


_GPT = RandomModel("gpt2", tied=True, fused_qkv=True, biases=FUSED_BIASES)

DENSE_ZOO: dict[str, RandomModel] = {
    "arcee": RandomModel("arcee", tied=True),
    "baichuan": RandomModel("baichuan", layers=40, feed_forward=32),
    "baichuan-7b": RandomModel("baichuan", layers=32, feed_forward=32),
    "bitnet": RandomModel("bitnet", tied=True),
    "bitnet-scales": RandomModel("bitnet", tied=True, scales=True),
    "bloom": replace(_GPT, architecture="bloom"),
    "chatglm": RandomModel("chatglm", fused=True, biases=("attn_qkv",), extra={"rope.dimension_count": 8}),
    "codeshell": RandomModel("codeshell", biases=(*QKV, "attn_output", "ffn_up", "ffn_down")),
    "falcon": RandomModel("falcon", tied=True, kv_heads=1, fused_qkv=True),
    "falcon-40b": RandomModel("falcon", fused_qkv=True, own_norms=True),
    "gpt2": _GPT,
    "gptneox": replace(
        _GPT,
        architecture="gptneox",
        tied=False,
        extra={"use_parallel_residual": True, "rope.dimension_count": 4},
    ),
    "gptneox-sequential": replace(
        _GPT, architecture="gptneox", tied=False, extra={"use_parallel_residual": False}
    ),
    "internlm2": RandomModel("internlm2"),
    "jais": RandomModel(
        "jais",
        fused_qkv=True,
        biases=(*FUSED_BIASES, "ffn_gate"),
        extra={"attention.max_alibi_bias": 8.0},
    ),
    "minicpm": RandomModel("minicpm", tied=True),
    "minicpm-scales": RandomModel(
        "minicpm", extra={"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 2.0}
    ),
    "mpt": RandomModel(
        "mpt",
        tied=True,
        width=96,
        heads=6,
        fused_qkv=True,
        extra={"attention.max_alibi_bias": 6.0, "attention.clamp_kqv": 1.2},
    ),
    "mpt-positions": replace(_GPT, architecture="mpt", positions=True),
    "olmo": RandomModel("olmo"),
    "olmo-clamp": RandomModel("olmo", extra={"attention.clamp_kqv": 0.8}),
    "orion": RandomModel("orion"),
    "phi2": RandomModel(
        "phi2",
        fused_qkv=True,
        biases=FUSED_BIASES,
        head_bias=True,
        extra={"rope.dimension_count": 8},
    ),
    "phimoe": RandomModel(
        "phimoe",
        biases=(*QKV, "attn_output"),
        head_bias=True,
        norm_biases=True,
        experts=8,
        experts_per_token=2,
        extra={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.19,
        },
        rope_tensors={
            "rope_factors_long.weight": long_factors(40.0),
            "rope_factors_short.weight": long_factors(2.0),
        },
    ),
    "plamo": RandomModel("plamo"),
    "qwen": RandomModel("qwen", kv_heads=4, fused_qkv=True, biases=("attn_qkv",)),
    "refact": RandomModel("refact", kv_heads=1),
    "starcoder": replace(_GPT, architecture="starcoder", kv_heads=1),
    "xverse": RandomModel("xverse"),
}
"""One file or more for each of these architectures."""
