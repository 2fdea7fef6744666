"""The arguments of the MoE kernels."""

from typing import Annotated, Any

from edgeinfer_kernels.cpu.runtime.block_args import Input, Matrix, NeuronColumnsArgs, NeuronRowsArgs, Norm
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, structure


@structure()
class ActiveExpert(Structure):
    """An expert in use: its assignments have `assignments` contiguous rows from `first_row` on."""

    expert: Int
    first_row: Int
    assignments: Int


@structure()
class ActiveExperts(Structure):
    """The number of experts in use; an `ActiveExpert` for each follows it."""

    count: Int
    experts: Annotated[Any, ActiveExpert * 0]


@structure()
class SparseExpertsArgs(Structure):
    """The matrices of sparse experts by neuron; those of an expert follow those of the one before.

    up_rows: 0 without a gate, because up is then multiplied as a whole; up_stride: bytes of an expert's rows.
    down: one for each expert. scratch, of each thread: SPARSE_SCRATCH, then
    SPARSE_TOKENS times the activations by lanes.
    """

    up_rows: Annotated[int, NeuronRowsArgs]
    up_stride: Int
    down: Annotated[int, NeuronColumnsArgs]
    scratch: Int
    scratch_stride: Int
    lanes_stride: Int


@structure()
class ExpertsArgs(Structure):
    """An MoE block.

    `ids` (int64, highest score first) and `weights` (float32) have `experts_per_token` entries per token. A
    token-expert assignment has the number t·experts_per_token + slot. Its activations are in row
    `assignment_rows`[number] of `gathered` (normed rows), of `hidden` and `gate`, and of `out`.
    `entries`[number] is the index of its expert in `active`. pre_attention_router: the scores are already
    computed (`route_block`, which reads x through router_norm into router_input). shared_up_matrix 0: no
    shared expert; gate_matrix 0: experts have no gate. selection: 0 or for the ranks of a token's experts;
    selection_bias: 0 or float32 of each expert. shared_router: 0 or its float32 vector. If a device
    selects the experts, `ids` are indices among the experts on this host, negative for others: ELSEWHERE
    minus the expert number. assignments_seen,
    assignments_here: how many assignments the device has made in total, and of experts on this host.
    requests: 0, or the address of the request counts (int64) by expert number; this needs all experts on the
    host. expert_input: `normed`, or the rows of the latent projection latent_down; latent_sum: the sums of
    the experts' results, which latent_up multiplies to `sums`. shared_gain: 0, or the float32 factors of the
    normed rows in shared_input, which the shared expert reads; then its result and the experts' sum, in
    `sums`, have norms. post_norm: 0, or the norm of the whole sum, in `sums`. expert_scales: 0 or a float32
    factor of each expert's weights. is_partial: the sum of the experts on this host replaces x.
    weighted_input: the experts' weights multiply the products of their input, not their results. sparse: 0,
    or what steps of up to SPARSE_TOKENS read instead of up_matrix (if there is a gate) and down_matrix.
    """

    norm: Norm
    router: Matrix
    router_norm: Norm
    router_input: Input
    pre_attention_router: Int
    count: Int
    experts_per_token: Int
    gating: Int
    normalized: Int
    weight_scale: Float
    activation: Int
    residual_scale: Float
    scores: Int
    scores_stride: Int
    selection: Int
    selection_stride: Int
    selection_bias: Int
    groups: Int
    groups_per_token: Int
    ids: Int
    ids_stride: Int
    weights: Int
    assignment_rows: Int
    entries: Int
    active: Annotated[int, ActiveExperts]
    normed: Input
    gathered: Input
    hidden: Input
    gate: Int
    gate_matrix: Matrix
    up_matrix: Matrix
    down_matrix: Matrix
    out: Int
    out_stride: Int
    shared_activation: Int
    shared_gate_matrix: Matrix
    shared_up_matrix: Matrix
    shared_down_matrix: Matrix
    shared_hidden: Input
    shared_gate: Int
    shared_out: Int
    shared_out_stride: Int
    shared_router: Int
    expert_input: Input
    latent_down: Matrix
    latent_up: Matrix
    latent_sum: Input
    sums: Int
    sums_stride: Int
    shared_input: Input
    shared_gain: Int
    shared_norm: Norm
    expert_norm: Norm
    post_norm: Norm
    expert_scales: Int
    is_partial: Int
    weighted_input: Int
    assignments_seen: Int
    assignments_here: Int
    requests: Int
    sparse: Annotated[int, SparseExpertsArgs]
    scratch: Int
    scratch_stride: Int
