"""The arguments of the kernels of recurrent blocks.

Fields that end in `stride` are bytes per token; those of `scratch` are bytes per thread.
"""

from typing import Annotated

from edgeinfer_kernels.cpu.runtime.block_args import Input, Matrix, Norm
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, structure


@structure()
class RecurrentArgs(Structure):
    """The state of a recurrent block, as in `recurrent_state.py`, and the rows of a step's tokens.

    ring: RING_ROWS rows of `row_bytes`. slots: each of `slot_bytes`, tail_rows rows of `tail_bytes` first,
    then the matrix, `matrix_at` bytes after the beginning.
    """

    rows: Int
    row_stride: Int
    row_bytes: Int
    ring: Int
    slots: Int
    slot_bytes: Int
    tail_rows: Int
    tail_bytes: Int
    matrix_at: Int


State = Annotated[int, RecurrentArgs]


@structure()
class ShortConvolutionArgs(Structure):
    """A gated short convolution.

    weights: float32 of each tap, rows of `tail_bytes` of the state. row_stride: that of b, c and x.
    """

    norm: Norm
    b_matrix: Matrix
    c_matrix: Matrix
    x_matrix: Matrix
    output_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    normed: Input
    conv_out: Input
    b: Int
    c: Int
    x: Int
    row_stride: Int
    channels: Int
    taps: Int
    weights: Int
    state: State
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class DeltaRuleArgs(Structure):
    """The heads of a gated delta net or of a Kimi Delta Attention.

    conv_out: the results, gated by z: by silu with silu_gate, else by a sigmoid. tap_weights: float32 of each
    tap, rows of `tail_bytes` of the state. a, dt: float32 of each element of g. conv_rows: the rows of
    pending positions and of the step after the convolution. gates_at: bytes before β in a row of the state; g
    follows after `gate_bytes`, in `gate_parts` of `part_bytes`. decays_at: bytes before e^g in `conv_rows`,
    if each key element has a decay; 0: each head has one.
    """

    head_norm: Norm
    epsilon: Float
    conv_out: Input
    state: State
    key_heads: Int
    value_heads: Int
    head_dim: Int
    repeats_each: Int
    taps: Int
    tap_weights: Int
    a: Int
    dt: Int
    gates_at: Int
    gate_bytes: Int
    gate_parts: Int
    part_bytes: Int
    decays_at: Int
    silu_gate: Int
    conv_rows: Int
    conv_stride: Int
    z: Int
    z_stride: Int


Heads = Annotated[int, DeltaRuleArgs]


@structure()
class GatedDeltaNetArgs(Structure):
    """A gated delta net."""

    norm: Norm
    qkv_matrix: Matrix
    z_matrix: Matrix
    beta_matrix: Matrix
    alpha_matrix: Matrix
    output_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    normed: Input
    conv_out: Input
    heads: Heads
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class KimiDeltaAttentionArgs(Structure):
    """A Kimi Delta Attention. low_f, low_g: the results of F₁ and G₁."""

    norm: Norm
    q_matrix: Matrix
    k_matrix: Matrix
    v_matrix: Matrix
    f1_matrix: Matrix
    g1_matrix: Matrix
    beta_matrix: Matrix
    f2_matrix: Matrix
    g2_matrix: Matrix
    output_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    normed: Input
    low_f: Input
    low_g: Input
    conv_out: Input
    heads: Heads
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class MambaArgs(Structure):
    """A Mamba-1 block.

    inputs: u, the results of the convolution. tap_weights: float32 of each tap, rows of `tail_bytes` of the
    state. tap_bias, dt_bias, skip: float32 of each channel; a: in the layout of the state. delta_at, b_at:
    bytes before Δ and B in a row of the state.
    """

    norm: Norm
    x_matrix: Matrix
    z_matrix: Matrix
    dt_matrix: Matrix
    b_matrix: Matrix
    c_matrix: Matrix
    delta_matrix: Matrix
    output_matrix: Matrix
    dt_norm: Norm
    b_norm: Norm
    c_norm: Norm
    post_norm: Norm
    residual_scale: Float
    normed: Input
    inputs: Input
    dt: Input
    conv_out: Input
    state: State
    channels: Int
    state_size: Int
    taps: Int
    tap_weights: Int
    tap_bias: Int
    dt_bias: Int
    a: Int
    skip: Int
    delta_at: Int
    b_at: Int
    c: Int
    c_stride: Int
    z: Int
    z_stride: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class Mamba2Args(Structure):
    """A Mamba-2 block.

    group_norm: 0 or the float32 weights of the norm of all groups. tap_weights: float32 of each tap, rows of
    `tail_bytes` of the state. a, d, dt_bias: float32 of each head. conv_rows: the rows of pending positions
    and of the step after the convolution. dt_at: bytes before Δ in a row of the state.
    """

    norm: Norm
    z_matrix: Matrix
    xbc_matrix: Matrix
    dt_matrix: Matrix
    output_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    group_norm: Int
    epsilon: Float
    normed: Input
    conv_out: Input
    state: State
    heads: Int
    head_dim: Int
    state_size: Int
    groups: Int
    channels: Int
    taps: Int
    tap_weights: Int
    tap_bias: Int
    a: Int
    d: Int
    dt_bias: Int
    dt_at: Int
    conv_rows: Int
    conv_stride: Int
    z: Int
    z_stride: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class NormRowsArgs(Structure):
    """A norm whose rows are the input of a later block."""

    norm: Norm
    normed: Input


@structure()
class LayerOutputArgs(Structure):
    """The end of a layer. inputs: 0, or the per-layer inputs of the tokens, before `per_layer_inputs_block`
    their per-layer embeddings; rows of these and of projected_inputs are inputs_stride apart. norm: a copy.
    model_proj, projected_inputs and input_norm: only of the first layer.
    """

    norm: Norm
    scale: Float
    layer: Int
    layers: Int
    width: Int
    activation: Int
    inputs: Int
    inputs_stride: Int
    normed: Input
    hidden: Input
    inp_gate: Matrix
    proj: Matrix
    post_norm: Norm
    projected: Int
    projected_stride: Int
    embedding_scale: Float
    input_scale: Float
    model_proj: Matrix
    projected_inputs: Int
    input_norm: Norm
    scratch: Int
    scratch_stride: Int


@structure()
class Rwkv7ChannelMixArgs(Structure):
    """A channel mixing. lerp: float32 of each element."""

    norm: Norm
    key_matrix: Matrix
    value_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    mixed_k: Input
    hidden: Input
    state: State
    lerp: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class Rwkv7TimeMixArgs(Structure):
    """A time mixing.

    v1_matrix, v2_matrix: 0 in the first layer. lerp: six rows of float32, each of `part_bytes`, which are
    also the bytes of each part of a row of the state. w0, a0, v0, k_k, k_a, r_k, head_weight, head_bias:
    float32 of each element. first_value: the rows of v of the first layer.
    """

    norm: Norm
    receptance_matrix: Matrix
    key_matrix: Matrix
    value_matrix: Matrix
    w1_matrix: Matrix
    w2_matrix: Matrix
    a1_matrix: Matrix
    a2_matrix: Matrix
    v1_matrix: Matrix
    v2_matrix: Matrix
    g1_matrix: Matrix
    g2_matrix: Matrix
    output_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    head_epsilon: Float
    is_first: Int
    mixed_r: Input
    mixed_w: Input
    mixed_k: Input
    mixed_v: Input
    mixed_a: Input
    mixed_g: Input
    low_w: Input
    low_a: Input
    low_v: Input
    low_g: Input
    conv_out: Input
    state: State
    heads: Int
    head_dim: Int
    part_bytes: Int
    lerp: Int
    w0: Int
    a0: Int
    v0: Int
    k_k: Int
    k_a: Int
    r_k: Int
    head_weight: Int
    head_bias: Int
    receptance: Int
    first_value: Int
    value_rate: Int
    gate: Int
    row_stride: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int
