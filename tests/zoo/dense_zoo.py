"""The random models of the tests: dense models of older families."""

import numpy as np
import numpy.typing as npt

from tests.random_models import RandomModel

QKV = ("attn_q", "attn_k", "attn_v")
FUSED_BIASES = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


def long_factors(end: float) -> npt.NDArray[np.float32]:
    return np.linspace(1.0, end, 8, dtype=np.float32)


DENSE_ZOO: dict[str, RandomModel] = {
    "chatglm": RandomModel("chatglm", fused=True, biases=("attn_qkv",), extra={"rope.dimension_count": 8}),
    "codeshell": RandomModel("codeshell", biases=(*QKV, "attn_output", "ffn_up", "ffn_down")),
    "minicpm": RandomModel("minicpm", tied=True),
    "minicpm-scales": RandomModel(
        "minicpm", extra={"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 2.0}
    ),
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
    "xverse": RandomModel("xverse"),
}
"""One file or more for each of these architectures."""
