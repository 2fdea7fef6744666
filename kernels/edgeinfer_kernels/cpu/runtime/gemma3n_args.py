"""The arguments of the kernels of Gemma 3n's blocks.

Fields that end in `stride` are bytes per token; those of `scratch` are bytes per thread.
"""

from typing import Annotated

from edgeinfer_kernels.cpu.runtime.block_args import Input, Matrix, Norm
from edgeinfer_kernels.cpu.runtime.recurrent_args import LayerOutputArgs
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, structure


@structure()
class StreamsArgs(Structure):
    """The streams of tokens: `count` rows of `width` float32, `row_bytes` apart, also of the predictions;
    those of successive tokens are `stride` bytes apart. gains: the rows of the router times the norm's
    weights. coefs: rows of sixteen float32, of which `count` are used.
    """

    count: Int
    width: Int
    padded: Int
    row_bytes: Int
    streams: Int
    predictions: Int
    stride: Int
    gains: Int
    epsilon: Float
    coefs: Int
    scratch: Int
    scratch_stride: Int


Streams = Annotated[int, StreamsArgs]


@structure()
class AltUpProjectionArgs(Structure):
    """The projection of a stream, or to one. at: bytes before it in a token's streams. scale: of the sum of x
    and the projected stream. norm: a copy.
    """

    streams: Streams
    at: Int
    matrix: Matrix
    norm: Norm
    normed: Input
    scale: Float
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class AltUpCorrectArgs(Structure):
    """AltUp after a layer. correct_scale: float32 of each element."""

    streams: Streams
    correct_scale: Int
    output: Annotated[int, LayerOutputArgs]


@structure()
class LaurelArgs(Structure):
    """Laurel. norm: one that isn't computed."""

    norm: Norm
    normed: Input
    left: Matrix
    hidden: Input
    right: Matrix
    post_norm: Norm
    scale: Float
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class GaussianFeedForwardArgs(Structure):
    """A feed-forward of which few neurons are active. thresholds: a float32 for each token."""

    norm: Norm
    gate_matrix: Matrix
    up_matrix: Matrix
    down_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    activation: Int
    deviations: Float
    normed: Input
    hidden: Input
    gate: Int
    thresholds: Int
    threshold_stride: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int
