"""The shapes of model families: what their members have in common."""

from edgeinfer.shapes.gemma4_layers import Gemma4Layers
from edgeinfer.shapes.hybrid_layers import DeltaNetLayers
from edgeinfer.shapes.shape import Shape


def llama3(name: str, layers: int, width: int, feed_forward: int, heads: int, tied: bool) -> Shape:
    context = 131072 if tied else 8192
    return Shape(name, layers, width, feed_forward, heads, 8, 128256, context, tied=tied, rope_base=500000.0)


def qwen2(
    name: str, layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, tied: bool
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 151936 if tied else 152064, 32768,
        architecture="qwen2", tied=tied, rope_base=1000000.0, biases=True,
    )  # fmt: skip


def qwen3(name: str, layers: int, width: int, feed_forward: int, heads: int, tied: bool) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, 8, 151936, 40960,
        head_dim=128, architecture="qwen3", tied=tied, rope_base=1000000.0, qk_norm=True,
    )  # fmt: skip


def qwen35(
    name: str,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 248320, 262144,
        head_dim=256, architecture="qwen35", tied=tied, rope_base=10000000.0, qk_norm=True,
        recurrent=DeltaNetLayers(16, value_heads, rope_dim=64), attention_gate=True,
        feed_forward_norm="post_attention_norm",
    )  # fmt: skip


def gemma4(
    name: str,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    context: int,
    own: Gemma4Layers,
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 262144, context,
        head_dim=512, architecture="gemma4", tied=True, rope_base=1000000.0, gemma4=own,
    )  # fmt: skip


def qwen35_moe(name: str, layers: int, width: int, feed_forward: int, heads: int, value_heads: int) -> Shape:
    """`feed_forward`: neurons of an expert, and of the shared one."""
    return Shape(
        name, layers, width, feed_forward, heads, 2, 248320, 262144, head_dim=256, architecture="qwen35moe",
        rope_base=10000000.0, qk_norm=True, experts=256, experts_per_token=8, shared_expert=feed_forward,
        recurrent=DeltaNetLayers(16, value_heads, rope_dim=64), attention_gate=True,
        feed_forward_norm="post_attention_norm",
    )  # fmt: skip


def ministral3(name: str, layers: int, width: int, feed_forward: int, tied: bool = False) -> Shape:
    return Shape(
        name, layers, width, feed_forward, 32, 8, 131072, 262144, head_dim=128, architecture="mistral3",
        tied=tied, rope_base=1000000.0,
    )  # fmt: skip
