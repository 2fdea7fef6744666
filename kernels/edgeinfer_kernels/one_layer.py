"""Small synthetic decoders with a head of any size, for speed measurements."""

import numpy as np

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.decoder import (
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import block_format

WIDTH = 2048
SMALL = 256
NARROW, HEAD_DIM = 512, 64
"""hidden_size of a small model, and its head_dim."""
NORM = NormSpec("rms", 1e-5)


def one_layer(format_name: str, rows: int) -> tuple[DecoderSpec, DecoderWeights]:
    """A decoder of one small layer with a head of `rows` rows, all in one format; the weights are zeros."""
    attention = AttentionSpec(1, 1, SMALL, SMALL**-0.5, NORM, None)
    return _decoder(format_name, rows, WIDTH, SMALL, attention, 1, neurons=SMALL)


def narrow_layers(format_name: str, rows: int, layers: int) -> tuple[DecoderSpec, DecoderWeights]:
    """A decoder with the layer count of small models, hidden_size NARROW and a head of `rows`; the weights
    are zeros.
    """
    heads = NARROW // HEAD_DIM
    attention = AttentionSpec(heads, heads, HEAD_DIM, HEAD_DIM**-0.5, NORM, None)
    return _decoder(format_name, rows, NARROW, NARROW, attention, layers, neurons=4 * NARROW)


def wide_layers(format_name: str, nbytes: int) -> tuple[DecoderSpec, DecoderWeights]:
    """A decoder with layers of the size of large models (hidden_size WIDTH), as many as fit in `nbytes`; the
    weights are zeros.
    """
    attention = AttentionSpec(WIDTH // SMALL, WIDTH // SMALL, SMALL, SMALL**-0.5, NORM, None)
    layer = block_format(format_name).nbytes((12 * WIDTH * WIDTH,))
    return _decoder(
        format_name, 16, WIDTH, WIDTH, attention, max(1, round(nbytes / layer)), neurons=4 * WIDTH
    )


def _decoder(
    format_name: str,
    rows: int,
    width: int,
    hidden: int,
    attention: AttentionSpec,
    layers: int,
    neurons: int,
) -> tuple[DecoderSpec, DecoderWeights]:
    """Build the decoder; `hidden` is the number of rows of q, k and v."""

    def matrix(name: str, count: int, columns: int) -> Matrix:
        raw = np.zeros((count, block_format(format_name).row_bytes(columns)), np.uint8)
        return Matrix(name, format_name, count, columns, raw)

    def layer() -> LayerWeights:
        q, k, v = (matrix(f"attn_{part}", hidden, width) for part in "qkv")
        output, up, down = (
            matrix("attn_output", width, hidden),
            matrix("ffn_up", neurons, width),
            matrix("ffn_down", width, neurons),
        )
        blocks = AttentionWeights(q, k, v, output), FeedForwardWeights(up, down)
        return LayerWeights(tuple(ResidualWeights(block, ones) for block in blocks))

    head, ones = matrix("output", rows, width), np.ones(width, np.float32)
    specs = attention, FeedForwardSpec("silu", neurons, gated=False)
    layer_spec = LayerSpec(tuple(ResidualBlock(spec, NORM, "norm") for spec in specs))
    spec = DecoderSpec(width, rows, (layer_spec,) * layers, NORM)
    weights = tuple(layer() for _ in range(layers))
    return spec, DecoderWeights(head, head, ones, None, weights)
