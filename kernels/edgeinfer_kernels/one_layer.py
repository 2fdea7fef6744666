"""The smallest decoder with a head of any size: what speeds are measured on."""

import numpy as np

from edgeinfer_kernels.specification import (
    AttentionSpecification,
    DecoderSpecification,
    FeedForwardSpecification,
    LayerSpecification,
    NormSpecification,
)
from edgeinfer_kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    FeedForwardWeights,
    LayerWeights,
    Matrix,
)
from edgeinfer_quant_formats import block_format

WIDTH = 2048
SMALL = 256
NORM = NormSpecification("rms", 1e-5)


def one_layer(format_name: str, rows: int) -> tuple[DecoderSpecification, DecoderWeights]:
    """A decoder of one small layer with a head of `rows`, all in one format; its weights are zeros."""

    def matrix(name: str, count: int, columns: int) -> Matrix:
        raw = np.zeros((count, block_format(format_name).row_bytes(columns)), np.uint8)
        return Matrix(name, format_name, count, columns, raw)

    attention = AttentionSpecification(1, 1, SMALL, SMALL**-0.5, NORM, None)
    layer = LayerSpecification(attention, FeedForwardSpecification("silu", NORM))
    q, k, v = (matrix(f"attn_{part}", SMALL, WIDTH) for part in "qkv")
    head = matrix("output", rows, WIDTH)
    ones = np.ones(WIDTH, np.float32)
    layers = LayerWeights(
        AttentionWeights(q, k, v, matrix("attn_output", WIDTH, SMALL), attn_norm=ones),
        FeedForwardWeights(matrix("ffn_up", SMALL, WIDTH), matrix("ffn_down", WIDTH, SMALL), ffn_norm=ones),
    )
    specification = DecoderSpecification(WIDTH, rows, (layer,), NORM)
    return specification, DecoderWeights(head, head, ones, None, (layers,))
