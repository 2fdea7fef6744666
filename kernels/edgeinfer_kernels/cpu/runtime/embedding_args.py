"""The arguments of the kernels of the embedding's block kinds.

Fields that end in `stride` are bytes per token; those of `scratch` are bytes per thread.
"""

from edgeinfer_kernels.cpu.runtime.block_args import Input, Matrix, Norm
from edgeinfer_kernels.cpu.runtime.structure import Int, Structure, structure


@structure()
class EmbeddingNormArgs(Structure):
    """The norm of the embedding."""

    norm: Norm


@structure()
class PositionEmbeddingArgs(Structure):
    """The learned rows of positions, float32, `row_bytes` apart."""

    rows: Int
    positions: Int
    row_bytes: Int
    padded: Int


@structure()
class DraftInputArgs(Structure):
    """The input of a draft head. states: the hidden states of the tokens of a step at `start`. Later steps
    have one token each, whose state is `own`: the row that the head has normed.

    pair: a row of a token: the normed embedding, and `state_offset` bytes later the normed hidden state.
    """

    states: Int
    states_stride: Int
    start: Int
    own: Int
    enorm: Norm
    hnorm: Norm
    pair: Input
    state_offset: Int
    eh_proj: Matrix
    scratch: Int
    scratch_stride: Int


@structure()
class EagleInputArgs(Structure):
    """The input of an EAGLE-3 head. features: the target's hidden states of the tokens of a step at `start`
    at most, of all layers; in a later step `own` has the states of the tokens, which are those of the head.

    pair: a row of a token, as in `DraftInputArgs`; attention reads it.
    """

    features: Input
    start: Int
    feature_norm: Norm
    fc: Matrix
    own: Int
    own_stride: Int
    enorm: Norm
    hnorm: Norm
    pair: Input
    state_offset: Int
    norm_before_residual: Int
    scratch: Int
    scratch_stride: Int


@structure()
class FusedStatesArgs(Structure):
    """The fused states of a target. features: its hidden states of the tokens of a step, of all layers."""

    features: Input
    fc: Matrix
    norm: Norm
    scratch: Int
    scratch_stride: Int


@structure()
class ConvolutionArgs(Structure):
    """A convolution over the tokens of a step. rows: the normed ones, which `projection` multiplies. factors:
    its products; base: float32, (2, taps, width). residual, convolved: x before and after the convolution
    before a block. norm, rows and projection are 0 after a block.
    """

    norm: Norm
    rows: Input
    projection: Matrix
    factors: Int
    factors_stride: Int
    base: Int
    taps: Int
    group_size: Int
    width: Int
    residual: Int
    residual_stride: Int
    convolved: Int
    convolved_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class MedusaHeadArgs(Structure):
    """A Medusa head. normed: the rows of x; hidden: x + silu(linear · x + b); logits: float32."""

    norm: Norm
    normed: Input
    linear: Matrix
    hidden: Input
    output: Matrix
    logits: Int
    logits_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class AssistantInputArgs(Structure):
    """The input of a Gemma 4 assistant. states: a row of a token: the target's embedding, and `state_offset`
    bytes later a hidden state. start: below 0 if the state is post · `own`.
    """

    states: Input
    start: Int
    own: Input
    state_offset: Int
    pre: Matrix
    post: Matrix
    scratch: Int
    scratch_stride: Int
