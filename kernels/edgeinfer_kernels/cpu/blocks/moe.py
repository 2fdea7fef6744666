"""The structure that the MoE kernels read."""

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights, assignment_rows, lines
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call, RoutingRows
from edgeinfer_kernels.cpu.layout.packed_matrix import is_float_format, padded_vector
from edgeinfer_kernels.cpu.runtime.abi import GATING_CODES, quantized_bytes
from edgeinfer_kernels.cpu.runtime.experts_args import ExpertsArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Matrix

Residual = ResidualBlock[MoeSpec]
Weights = ResidualWeights[MoeWeights]
UNITS = ("experts",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: Residual,
    weights: Weights,
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernels of an MoE block. If another device selects the experts, it may have only some of them; it
    must have all if requests are counted.
    """
    if options.expert_weights:
        return BuiltBlock((Call("selected_experts_block", _given(builder, residual, weights, options)),))
    block = _routed(builder, residual, weights, options.routing)
    pre_attention_router = residual.block.pre_attention_router
    return BuiltBlock(
        (Call("experts_block", block),), (Call("route_block", block),) if pre_attention_router else ()
    )


def _routed(
    builder: BlockBuilder,
    residual: Residual,
    weights: Weights,
    routing: RoutingRows | None,
) -> int:
    """An ExpertsArgs structure; it writes the selected experts to `routing` if given."""
    spec, w, rows = residual.block, weights.block, builder.workspace.rows
    scores, scores_stride = rows("expert.scores")
    ids, ids_stride = routing or RoutingRows(rows("expert.ids")[0], 8 * spec.experts_per_token)
    first_readers = [w.ffn_gate_inp, *_normed_readers(w)]
    if w.shared is not None and w.shared_gain is None:
        first_readers += [w.shared.ffn_up, *([w.shared.ffn_gate] if w.shared.ffn_gate else [])]
    normed = builder.input("normed", builder.width, first_readers)
    return builder.arena.fill(
        ExpertsArgs,
        router=builder.matrix(w.ffn_gate_inp, w.ffn_gate_inp_bias),
        pre_attention_router=int(spec.pre_attention_router),
        gating=GATING_CODES[spec.gating],
        normalized=int(spec.normalized),
        weight_scale=spec.scale,
        scores=scores,
        scores_stride=scores_stride,
        ids=ids,
        ids_stride=ids_stride,
        weights=rows("expert.weights")[0],
        **_selection(builder, spec, w),
        normed=normed,
        residual_scale=residual.residual_scale,
        **_pre_attention(builder, residual, w),
        **(
            _own(builder, residual, weights, normed)
            | _shared(builder, spec, w, normed)
            | _dense(builder, residual, weights)
            | _post_norm(builder, residual, weights)
        ),
    )


def _given(
    builder: BlockBuilder,
    residual: Residual,
    weights: Weights,
    options: BlockOptions,
) -> int:
    """An ExpertsArgs structure for experts that another device selects. It gets their sum alone if a norm
    follows.
    """
    w, routing = weights.block, options.routing
    assert routing is not None
    is_partial = weights.post_norm is not None or residual.block.dense_norm is not None
    normed = builder.input("normed", builder.width, _normed_readers(w))
    return builder.arena.fill(
        ExpertsArgs,
        ids=routing.ids,
        ids_stride=routing.stride,
        weights=options.expert_weights,
        requests=0 if options.requests is None else builder.arena.keep(options.requests),
        normed=normed,
        is_partial=int(is_partial),
        residual_scale=1.0 if is_partial else residual.residual_scale,
        **_own(builder, residual, weights, normed),
    )


def _own(builder: BlockBuilder, residual: Residual, weights: Weights, normed: int) -> dict[str, float]:
    """The fields of the experts themselves; `normed`: the address of the normed rows."""
    spec, w, rows = residual.block, weights.block, builder.workspace.rows
    hidden, width = w.ffn_up_exps.rows, w.ffn_up_exps.columns
    return {
        "norm": builder.norm(residual.norm, builder.width, weights.norm, weights.norm_bias),
        "expert_input": normed,
        **_latent(builder, w),
        "count": w.ffn_up_exps.experts,
        "experts_per_token": spec.experts_per_token,
        "weighted_input": int(spec.weighted_input),
        "activation": builder.activation(spec.activation),
        "assignment_rows": rows("expert.assignment_rows")[0],
        "entries": rows("expert.entries")[0],
        "active": rows("expert.active")[0],
        "gathered": _gathered(builder, width, _first_stacks(w), spec.experts_per_token),
        "hidden": _assignment_input(builder, "expert.hidden", hidden, [w.ffn_down_exps], keep_floats=True),
        "gate": rows("expert.gate")[0],
        "gate_matrix": builder.matrix(w.ffn_gate_exps, w.ffn_gate_exps_bias) if w.ffn_gate_exps else 0,
        "up_matrix": builder.matrix(w.ffn_up_exps, w.ffn_up_exps_bias),
        "down_matrix": builder.matrix(w.ffn_down_exps, w.ffn_down_exps_bias),
        "out": rows("expert.out")[0],
        "out_stride": lines(4 * padded(width)),
        **builder.scratch(),
    }


def _latent(builder: BlockBuilder, w: MoeWeights) -> dict[str, int]:
    """The fields of the latent projection."""
    if w.ffn_latent_down is None or w.ffn_latent_up is None:
        return {}
    width = w.ffn_latent_up.columns
    sums, sums_stride = builder.workspace.rows("expert.sum")
    return {
        "expert_input": builder.input("latent", width, _first_stacks(w)),
        "latent_down": builder.matrix(w.ffn_latent_down),
        "latent_up": builder.matrix(w.ffn_latent_up),
        "latent_sum": builder.input("latent.sum", width, [w.ffn_latent_up]),
        "sums": sums,
        "sums_stride": sums_stride,
    }


def _normed_readers(w: MoeWeights) -> list[Matrix]:
    """The matrices of the experts' part that read the normed rows."""
    return _first_stacks(w) if w.ffn_latent_down is None else [w.ffn_latent_down]


def _first_stacks(w: MoeWeights) -> list[Matrix]:
    """The stacked matrices that experts multiply first."""
    return [w.ffn_up_exps, *([w.ffn_gate_exps] if w.ffn_gate_exps else [])]


def _selection(builder: BlockBuilder, spec: MoeSpec, w: MoeWeights) -> dict[str, int]:
    """The fields of the experts' ranks."""
    if not spec.is_ranked:
        return {}
    selection, stride = builder.workspace.rows("expert.selection")
    return {
        "selection": selection,
        "selection_stride": stride,
        "selection_bias": builder.arena.keep(padded_vector(w.exp_probs_b)),
        "groups": spec.groups,
        "groups_per_token": spec.groups_per_token,
    }


def _gathered(builder: BlockBuilder, columns: int, readers: list[Matrix], experts_per_token: int) -> int:
    """The INPUT of the rows that experts read first; float32 if a matrix or an adapter reads them."""
    keep_floats = any(map(is_float_format, readers))
    args = _assignment_input(builder, "expert.gathered", columns, readers, keep_floats)
    if not keep_floats:
        builder.assignment_inputs.append((args, assignment_rows(experts_per_token)))
    return args


def _assignment_input(
    builder: BlockBuilder, name: str, columns: int, readers: list[Matrix], keep_floats: bool
) -> int:
    """An INPUT with a row for each token-expert assignment."""
    strides = lines(4 * padded(columns)), lines(quantized_bytes(padded(columns)))
    return builder.input(name, columns, readers, strides, keep_floats)


def _pre_attention(builder: BlockBuilder, residual: Residual, w: MoeWeights) -> dict[str, int]:
    if not residual.block.pre_attention_router:
        return {}
    return {
        "router_norm": builder.norm(residual.norm, builder.width, None),
        "router_input": builder.input("router", builder.width, [w.ffn_gate_inp]),
    }


def _dense(builder: BlockBuilder, residual: Residual, weights: Weights) -> dict[str, int]:
    """The fields of a dense feed-forward besides experts."""
    w, norm = weights.block, residual.block.dense_norm
    if norm is None or w.shared is None:
        return {}
    readers = [w.shared.ffn_up, *([w.shared.ffn_gate] if w.shared.ffn_gate else [])]
    return {
        "shared_input": builder.input("shared.normed", builder.width, readers),
        "shared_gain": builder.arena.keep(padded_vector(w.shared_gain)),
        "shared_norm": builder.norm(norm, builder.width, w.shared_norm),
        "expert_norm": builder.norm(norm, builder.width, w.expert_norm),
        "expert_scales": builder.arena.keep(padded_vector(w.expert_scales)),
    }


def _post_norm(builder: BlockBuilder, residual: Residual, weights: Weights) -> dict[str, int]:
    """The fields of the norm of the whole sum. A dense feed-forward besides experts has it without weights,
    which copies its input, if the file has none.
    """
    if weights.post_norm is None and residual.block.dense_norm is None:
        return {}
    sums, sums_stride = builder.workspace.rows("expert.sum")
    norm = builder.norm(residual.post_norm_spec, builder.width, weights.post_norm)
    return {"post_norm": norm, "sums": sums, "sums_stride": sums_stride}


def _shared(builder: BlockBuilder, spec: MoeSpec, w: MoeWeights, normed: int) -> dict[str, int]:
    """The fields of a shared expert that reads the rows `normed`."""
    if w.shared is None:
        return {}
    rows = builder.workspace.rows
    shared: FeedForwardWeights = w.shared
    gate, _ = rows("gate")
    out, out_stride = rows("projected")
    return {
        "shared_activation": builder.activation(spec.activation_of_shared),
        "shared_gate_matrix": builder.matrix(shared.ffn_gate) if shared.ffn_gate else 0,
        "shared_up_matrix": builder.matrix(shared.ffn_up),
        "shared_down_matrix": builder.matrix(shared.ffn_down),
        "shared_hidden": builder.input("hidden", shared.ffn_up.rows, [shared.ffn_down]),
        "shared_input": normed,
        "shared_gate": gate,
        "shared_out": out,
        "shared_out_stride": out_stride,
        "shared_router": builder.arena.keep(padded_vector(w.ffn_gate_inp_shexp)),
    }
