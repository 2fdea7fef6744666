"""The arguments of the kernels of each block kind, of the embedding, the output head and the draft loop.

Fields that end in `stride` are bytes per token; those of `scratch` are bytes per thread.
"""

from typing import Annotated

from edgeinfer_kernels.cpu.runtime.disk_args import BundleWindowArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import (
    FieldArgs,
    InputArgs,
    LoraArgs,
    MatrixArgs,
    NormArgs,
    ScheduleStep,
    StepArgs,
)
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, structure

Matrix = Annotated[int, MatrixArgs]
Norm = Annotated[int, NormArgs]
Input = Annotated[int, InputArgs]


@structure()
class CacheArgs(Structure):
    """A KV cache. key_kind, value_kind: one of CACHE_KINDS. context: allocated positions; position p is at
    index p % ring.
    """

    context: Int
    ring: Int
    key_kind: Int
    value_kind: Int
    key_cache: Int
    value_cache: Int
    key_scales: Int
    value_scales: Int


Cache = Annotated[int, CacheArgs]


@structure()
class AttentionArgs(Structure):
    """An attention block.

    qk_norm 0: none, 1: each head, 2: the whole row.
    sinks: 0 or a float32 for each head. gated: whether a head of projected_q is followed by its gate.
    gate_matrix: 0, or that of gates of whole heads, in head_gates.
    A value has value_dim elements, the first of a cached row of row_width. KV splits: at most
    pieces_per_thread, of at least positions_per_piece. temperatures: 0 or the float32 factors of queries, one
    for temperature_length positions each, the first for temperature_offset fewer. query_weights: 0 or the
    float32 factors of a head after RoPE.
    recent: 0, or the last positions of each sequence in f16 (`recent_pages.py`). queries_only: whether keys
    and values are those of another layer. value_norm: of values, 0: none. slopes: 0 or the float32 slopes of
    ALiBi; lane_indices: 0, 1 … 15 in float32. clamp: the largest magnitude of q, k and v, 0: none. sub_norm:
    of attn_out, 0: none. whole_step: whether a token attends to all of its step.
    """

    heads: Int
    kv_heads: Int
    head_dim: Int
    padded_head: Int
    window: Int
    chunked: Int
    whole_step: Int
    scale: Float
    soft_cap: Float
    rope_dim: Int
    rope_neox: Int
    qk_norm: Int
    temperatures: Int
    temperature_length: Int
    temperature_offset: Int
    query_weights: Int
    cache: Cache
    recent: Cache
    norm: Norm
    q_matrix: Matrix
    k_matrix: Matrix
    v_matrix: Matrix
    output_matrix: Matrix
    q_norm: Norm
    k_norm: Norm
    value_norm: Norm
    queries_only: Int
    gate_matrix: Matrix
    head_gates: Int
    head_gates_stride: Int
    has_softplus_gates: Int
    post_norm: Norm
    residual_scale: Float
    normed: Input
    attn_out: Input
    queries: Int
    states: Int
    projected_q: Int
    projected_k: Int
    projected_v: Int
    projected: Int
    q_stride: Int
    kv_stride: Int
    query_stride: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int
    sinks: Int
    gated: Int
    value_dim: Int
    padded_value: Int
    row_width: Int
    pieces_per_thread: Int
    positions_per_piece: Int
    slopes: Int
    lane_indices: Int
    clamp: Float
    sub_norm: Norm


@structure()
class LatentAttentionArgs(Structure):
    """A latent attention block.

    attention: of all heads over the latent cache, with the fields that this needs; its attn_out has each
    head's sum of latent vectors. query_a_matrix 0: there is none, and query_matrix reads `normed`.
    """

    norm: Norm
    query_a_matrix: Matrix
    query_matrix: Matrix
    kv_matrix: Matrix
    key_matrix: Matrix
    value_matrix: Matrix
    output_matrix: Matrix
    query_norm: Norm
    latent_norm: Norm
    post_norm: Norm
    residual_scale: Float
    normed: Input
    query_latents: Input
    nope_queries: Input
    attn_out: Input
    attention: Annotated[int, AttentionArgs]
    nope_dim: Int
    rope_dim: Int
    latent_dim: Int
    value_dim: Int
    has_rope: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class FeedForwardArgs(Structure):
    """A dense feed-forward. gate_matrix 0: no gate; `gate` has the rows and stride of hidden's floats.
    sub_norm: of hidden, 0: none.
    """

    norm: Norm
    gate_matrix: Matrix
    up_matrix: Matrix
    down_matrix: Matrix
    post_norm: Norm
    residual_scale: Float
    activation: Int
    normed: Input
    hidden: Input
    sub_norm: Norm
    gate: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class NeuronRowsArgs(Structure):
    """Rows that are multiplied one by one (see `neuron_layout.py`): `groups` of sixteen blocks, `nbytes`
    bytes, and `row_bytes` from one to the next. slots: 0, or the index of each neuron's row, int32.
    """

    kernel: Int
    weights: Int
    groups: Int
    nbytes: Int
    row_bytes: Int
    slots: Int


@structure()
class NeuronColumnsArgs(Structure):
    """A down projection in the per-neuron layout; lengths in bytes, see `neuron_layout.ColumnLayout`.

    slots: 0, or the index of each neuron's weights, int32, from `bundles` on, neuron_bytes apart; then
    `weights` has the factors only. first_block: the first of the `blocks` that are summed; 0: sums begin.
    counts: the number of active neurons of each block of a token, one byte each, counts_stride bytes per
    token; not read if each thread sums a part of the outputs.
    """

    kernel: Int
    weights: Int
    blocks: Int
    block_bytes: Int
    blocks_per_super: Int
    super_bytes: Int
    super_factor_bytes: Int
    factor_bytes: Int
    neuron_bytes: Int
    outputs: Int
    slots: Int
    bundles: Int
    first_block: Int
    counts: Int
    counts_stride: Int


@structure()
class SparseArgs(Structure):
    """A sparse feed-forward.

    gate_rows, up_rows: the first (the second without a gate) only with a predictor. predictor_rows,
    predictor_second: 0 without one; predictor_bias: float32 per neuron; rectified: whether the first products
    are rectified, see `NeuronPredictor`. predicted: float32 rows of `rank`
    columns. scratch, of each thread: SPARSE_SCRATCH, then SPARSE_TOKENS times the activations by lanes; from
    `sums_offset` on as many rows in which down is accumulated; from `predicted_offset` on the int8 blocks of
    `predicted`; from `steps_offset` on the scratch of the kernel of down. window: of the bundles of active
    neurons, 0: all neurons are in memory.
    """

    dense: Annotated[int, FeedForwardArgs]
    gate_rows: Annotated[int, NeuronRowsArgs]
    up_rows: Annotated[int, NeuronRowsArgs]
    down: Annotated[int, NeuronColumnsArgs]
    predictor_rows: Annotated[int, NeuronRowsArgs]
    predictor_second: Matrix
    predictor_bias: Int
    rectified: Int
    predicted: Int
    predicted_stride: Int
    predicted_offset: Int
    predicted_quantized_stride: Int
    rank: Int
    neurons_per_piece: Int
    sums_offset: Int
    sums_stride: Int
    steps_offset: Int
    scratch: Int
    scratch_stride: Int
    lanes_stride: Int
    window: Annotated[int, BundleWindowArgs]


@structure()
class HeadArgs(Structure):
    """The output norm and head."""

    norm: Norm
    matrix: Matrix
    normed: Input
    logits: Int
    logits_stride: Int
    scratch: Int
    scratch_stride: Int


@structure()
class BestTokensArgs(Structure):
    """The largest of the scaled logits of a step's tokens: `vocabulary` float32 of each; ids: int64."""

    logits: Int
    logits_stride: Int
    vocabulary: Int
    scale: Float
    ids: Int


@structure()
class EmbedArgs(Structure):
    """Embeddings of the rows `ids`, int64.

    decode: the kernel of `decode_row.py` for the format of the rows, which are `row_bytes` apart from
    `source` on; fields and scratch are its arguments. lora: 0, or an adapter whose a and b are row-major.
    """

    ids: Int
    decode: Int
    source: Int
    row_bytes: Int
    columns: Int
    fields: Annotated[int, FieldArgs]
    field_count: Int
    scale: Float
    scratch: Int
    scratch_stride: Int
    lora: Annotated[int, LoraArgs]


@structure()
class DraftStepArgs(Structure):
    """The step arguments of one kind of RoPE, and the bytes of its cosines and sines per position."""

    step: Annotated[int, StepArgs]
    rope_bytes: Int


@structure(pitch=4)
class LogitsPart(Structure):
    """The largest of LOGITS_PER_PART logits, the sum of exponentials relative to it, and its index."""

    top: Float
    total: Float
    index: Int


@structure()
class DraftArgs(Structure):
    """A draft loop.

    schedule, steps: a token's embedding, all layers and the head, as `run_schedule` takes them. step_args:
    one for each kind of RoPE; head_step: that of the head, which reads the last of the given tokens' rows
    first; x: the row of a single token afterwards. id_limit: only token ids below this may be drafted; parts:
    for every LOGITS_PER_PART logits. min_probs: for each of `max_tokens` draft tokens the minimum cumulative
    probability; min_probs_to_continue: the minimum for another token after it, float32. temperature 0: the
    argmax is drafted, and `probs` are its softmax. Otherwise the token is sampled from the candidates, which
    are at most `reach` below the largest logit and are filtered by top_k (0: off) and top_p. uniforms: 0, or
    a float32 uniform number in [0, 1) for each sample. candidates, weights: MAX_CANDIDATES int64 and float32
    per draft token. row_ids: 0, or the int64 ids of the rows of the output matrix. own: 0, or where the
    head's state of `own_columns` elements is kept for the next token. The outputs are `count` ids with their
    probabilities and the number of forwards. Initial values: count 0, is_running 1, reached 1.0.
    """

    schedule: Annotated[int, ScheduleStep]
    steps: Int
    embed: Annotated[int, EmbedArgs]
    step_args: Annotated[int, DraftStepArgs]
    step_arg_count: Int
    head_step: Annotated[int, StepArgs]
    x: Int
    logits: Int
    logit_scale: Float
    id_limit: Int
    parts: Annotated[int, LogitsPart]
    min_probs: Int
    min_probs_to_continue: Int
    temperature: Float
    top_k: Int
    top_p: Float
    reach: Float
    candidates: Int
    weights: Int
    candidate_counts: Int
    sorted_logits: Int
    ids: Int
    probs: Int
    row_ids: Int
    own: Int
    own_columns: Int
    max_tokens: Int
    uniforms: Int
    count: Int
    is_running: Int
    reached: Float
    forwards: Int
