"""Decoders of well-known shapes without weights, for code that uses only sizes and formats."""

from collections.abc import Callable

import numpy as np

from edgeinfer.shapes.headers import matrix_formats
from edgeinfer.shapes.shape import Shape
from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.decoder import (
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.matrix import Matrix, Vector

NORM = NormSpec("rms", 1e-5)
_NOTHING = np.zeros((1, 1), np.uint8)


def empty_decoder(shape: Shape, kind: str) -> tuple[DecoderSpec, DecoderWeights]:
    """The decoder of a shape with a mix's formats; its matrices hold no bytes.

    Raises `FormatError` for an unknown mix, `SettingError` for one that the shape can't have.
    """
    sizes, formats = shape.matrices(), matrix_formats(shape, kind)

    def matrix(name: str) -> Matrix:
        *experts, rows, columns = sizes[name]
        return Matrix(name, formats[name], rows, columns, _NOTHING, experts[0] if experts else 1)

    embedding = matrix("token_embd.weight")
    layers = tuple(_layer_weights(shape, f"blk.{index}", matrix) for index in range(shape.layers))
    rope = RopeSpec((1.0,) * (shape.head_size // 2), neox=True)
    attention = AttentionSpec(
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        shape.head_size**-0.5,
        NORM,
        rope,
        "head" if shape.qk_norm else "row" if shape.row_norms else "none",
    )
    second: FeedForwardSpec | MoeSpec = FeedForwardSpec("silu", shape.feed_forward)
    if shape.experts:
        second = MoeSpec(
            "silu", shape.experts, shape.experts_per_token, shape.feed_forward, "softmax", normalized=True
        )
    layer = LayerSpec(tuple(ResidualBlock(block, NORM, "norm") for block in (attention, second)))
    return (
        DecoderSpec(shape.width, shape.vocabulary, (layer,) * shape.layers, NORM),
        DecoderWeights(
            embedding,
            embedding if shape.tied else matrix("output.weight"),
            np.ones(shape.width, np.float32),
            None,
            layers,
        ),
    )


def _norm_weight(shape: Shape, projected: Matrix) -> Vector | None:
    """Of the norm of queries or keys."""
    if not shape.qk_norm and not shape.row_norms:
        return None
    return np.ones(projected.rows if shape.row_norms else shape.head_size, np.float32)


def _layer_weights(shape: Shape, prefix: str, matrix: Callable[[str], Matrix]) -> LayerWeights:
    gain = np.ones(shape.width, np.float32)
    q, k, v, output = (
        matrix(f"{prefix}.{name}.weight") for name in ("attn_q", "attn_k", "attn_v", "attn_output")
    )
    norms = [_norm_weight(shape, each) for each in (q, k)]
    biases = [np.zeros(each.rows, np.float32) if shape.biases else None for each in (q, k, v)]
    attention = AttentionWeights(
        q,
        k,
        v,
        output,
        attn_q_bias=biases[0],
        attn_k_bias=biases[1],
        attn_v_bias=biases[2],
        attn_q_norm=norms[0],
        attn_k_norm=norms[1],
    )
    kind = "_exps" if shape.experts else ""
    up, down, gate = (matrix(f"{prefix}.{name}{kind}.weight") for name in ("ffn_up", "ffn_down", "ffn_gate"))
    block: FeedForwardWeights | MoeWeights = FeedForwardWeights(up, down, gate)
    if shape.experts:
        block = MoeWeights(matrix(f"{prefix}.ffn_gate_inp.weight"), up, down, gate)
    return LayerWeights((ResidualWeights(attention, gain), ResidualWeights(block, gain)))
