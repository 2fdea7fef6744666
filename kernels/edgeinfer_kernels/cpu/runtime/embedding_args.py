"""The arguments of the kernels of the embedding's block kinds, and of drafts whose input one of these reads.

Fields that end in `stride` are bytes per token; those of `scratch` are bytes per thread.
"""

from typing import Annotated

from edgeinfer_kernels.cpu.runtime.block_args import DraftArgs, DraftStepArgs, Input, Matrix, Norm
from edgeinfer_kernels.cpu.runtime.kernel_args import ScheduleStep, StepArgs
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


@structure()
class VerifyingArgs(Structure):
    """The step of a target that verifies a draft: its embedding, all layers, the head and `best_tokens_block`
    as a schedule. step_args: one for each kind of RoPE; head_step: that of the head. ids: the int64 tokens
    that the embedding reads; best: those that the step finds after each. x: the rows after the last layer;
    norm: the one before the head.
    """

    schedule: Annotated[int, ScheduleStep]
    steps: Int
    step_args: Annotated[int, DraftStepArgs]
    step_arg_count: Int
    head_step: Annotated[int, StepArgs]
    ids: Int
    best: Int
    x: Int
    x_stride: Int
    norm: Norm


@structure()
class DraftCyclesArgs(Structure):
    """Several drafts of a head, each with the step of its target that verifies it.

    given: the int64 tokens that the head reads before a draft, at `head_start`, `given_count` of them;
    head_stride: bytes between its rows. input: where the head reads the target's states; states: where those
    of the tokens of the next step are written, `states_stride` bytes apart. start: position of the last token
    of the text in the target. longest: tokens of a draft at most; limit: of the next one, if fewer tokens are
    left of the completion. end_ids: `end_count` int64 tokens that end the run. clock_function, clock_id: the
    C function that writes the time, and its first argument, if that is not negative; clock_time: where it
    does, two int64, the first of which is `clock_multiple` of the second. times: in the unit of that, the
    begin of the run, and the ends of each draft and of each step.

    The outputs are the number of `cycles`; for each of them the number of its draft tokens, which are in
    order in `drafted` with their `probs`, and of the tokens that its step found after the text, which are in
    `found`: the right ones of the draft and the one after them. All are int64, the probabilities float32.
    Initial values: cycles, drafted_count and found_count 0, is_running 1, and those of `draft`.
    """

    draft: Annotated[int, DraftArgs]
    target: Annotated[int, VerifyingArgs]
    input: Annotated[int, DraftInputArgs]
    given: Int
    given_count: Int
    head_start: Int
    head_stride: Int
    states: Int
    states_stride: Int
    start: Int
    longest: Int
    limit: Int
    end_ids: Int
    end_count: Int
    clock_function: Int
    clock_id: Int
    clock_time: Int
    clock_multiple: Int
    times: Int
    draft_lengths: Int
    step_lengths: Int
    drafted: Int
    probs: Int
    found: Int
    max_cycles: Int
    cycles: Int
    drafted_count: Int
    found_count: Int
    is_running: Int
