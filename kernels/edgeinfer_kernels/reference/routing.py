"""The router formula: from router scores to experts and their weights."""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.specification import MIN_WEIGHT_SUM, ExpertsSpecification

Array = npt.NDArray[np.floating]


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def route(scores: Array, facts: ExpertsSpecification) -> tuple[npt.NDArray[np.int64], Array]:
    """Experts (tokens, experts_per_token), highest score first, and their weights, from scores (tokens,
    count).
    """
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : facts.used]
    if facts.gating == "softmax_of_chosen":
        weights = softmax(np.take_along_axis(scores, chosen, axis=1))
    else:
        all_weights = softmax(scores) if facts.gating == "softmax" else 1 / (1 + np.exp(-scores))
        weights = np.take_along_axis(all_weights, chosen, axis=1)
    if facts.normalized:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    return chosen, np.asarray(weights * facts.scale)
