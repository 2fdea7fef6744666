"""Mixture of experts in numpy."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.moe import MIN_WEIGHT_SUM, MoeSpec
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.reference.blocks.feed_forward import dense
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, sigmoid


def forward(step: BlockStep, h: Array) -> Array:
    """Σ weight · expert(h) of the selected experts, plus the shared expert."""
    spec, w = step.spec, step.weights
    router_input = step.layer_input if spec.pre_attention_router else h
    scores = step.times(router_input, w.ffn_gate_inp, w.ffn_gate_inp_bias)
    selected, weights = route(scores, spec, w.exp_probs_b)
    if w.expert_scales is not None:
        weights = weights * w.expert_scales[selected]
    if step.routing is not None:
        step.routing.ids[step.index.layer, : len(h), : spec.experts_per_token] = selected
    read = h if w.ffn_latent_down is None else step.times(h, w.ffn_latent_down)
    y = np.zeros_like(read)
    for expert in np.unique(selected):
        token, slot = np.nonzero(selected == expert)
        own = weights[token, slot, None]
        rows = own * read[token] if spec.weighted_input else read[token]
        result = dense(replace(step, expert=int(expert)), rows, spec.activation, w.expert(int(expert)))
        y[token] += result if spec.weighted_input else own * result
    if w.ffn_latent_up is not None:
        y = step.times(y, w.ffn_latent_up)
    if spec.dense_norm is not None:
        shared = dense(step, h * w.shared_gain, spec.activation_of_shared, w.shared)
        y = normalize(y, spec.dense_norm, w.expert_norm) + normalize(shared, spec.dense_norm, w.shared_norm)
    elif w.shared is not None:
        shared = dense(step, h, spec.activation_of_shared, w.shared)
        if w.ffn_gate_inp_shexp is not None:
            shared = shared / (1 + np.exp(-h @ w.ffn_gate_inp_shexp))[:, None]
        y += shared
    return y


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def route(scores: Array, spec: MoeSpec, bias: Vector | None = None) -> tuple[npt.NDArray[np.int64], Array]:
    """Experts (tokens, experts_per_token), highest score first, and their weights, from scores (tokens,
    experts). `bias` (experts,): of the selection.
    """
    ranks = _ranks(scores, spec, bias) if spec.is_ranked else scores
    selected = np.argsort(-ranks, axis=1, kind="stable")[:, : spec.experts_per_token]
    if spec.gating == "softmax_of_selected":
        weights = softmax(np.take_along_axis(scores, selected, axis=1))
    else:
        all_weights = softmax(scores) if spec.gating == "softmax" else 1 / (1 + np.exp(-scores))
        weights = np.take_along_axis(all_weights, selected, axis=1)
    if spec.normalized:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    return selected, np.asarray(weights * spec.scale)


def _ranks(scores: Array, spec: MoeSpec, bias: Vector | None) -> Array:
    """The ranks of experts (tokens, experts); -inf in groups that no expert is selected from."""
    ranks = softmax(scores) if spec.gating == "softmax" else sigmoid(scores)
    ranks = np.asarray(ranks if bias is None else ranks + bias)
    if spec.groups > 1:
        groups = ranks.reshape(len(ranks), spec.groups, -1)
        best = np.argsort(-np.sort(groups, axis=2)[:, :, -2:].sum(axis=2), axis=1, kind="stable")
        left_out = best[:, spec.groups_per_token :]
        np.put_along_axis(groups, left_out[:, :, None], -np.inf, axis=1)
    return ranks
