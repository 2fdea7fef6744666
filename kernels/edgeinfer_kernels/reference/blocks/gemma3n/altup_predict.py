"""AltUp before a layer in numpy."""

from collections.abc import Sequence

import numpy as np

from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpRouter
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize

STREAMS, PREDICTIONS = "AltUp streams", "AltUp predictions"
"""Names of shared results, (tokens, streams, hidden_size)."""


def length(x: Array) -> Array:
    """The Euclidean length over the last axis, which is kept."""
    return np.asarray(np.sqrt(np.sum(x * x, axis=-1, keepdims=True)))


def with_length(step: BlockStep, x: Array, matrix: Matrix, wanted: Array) -> Array:
    """The product of x and a matrix, scaled to the wanted length."""
    y = step.times(x, matrix)
    return np.asarray(y * wanted / length(y))


def modalities(step: BlockStep, x: Array, router: AltUpRouter) -> Array:
    """(tokens, streams): the results of the router."""
    width = x.shape[1]
    rows = router.weight.reshape(-1, width).astype(step.dtype)
    return np.asarray(np.tanh(normalize(x, step.spec.norm, router.norm) / width @ rows.T))


def expanded(step: BlockStep, x: Array, matrices: Sequence[Matrix]) -> Array:
    """The streams of embeddings x."""
    others = [with_length(step, x, matrix, length(x)) for matrix in matrices]
    return np.stack([x, *others], axis=1)


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes its prediction."""
    spec, w = step.spec, step.weights
    if spec.is_first:
        step.shared[STREAMS] = expanded(step, h, w.expand)
    streams, count = step.shared[STREAMS], spec.streams
    coefs = modalities(step, h, w.router) @ w.coef.reshape(-1, count).T.astype(step.dtype)
    predictions = streams + coefs.reshape(-1, count, count) @ streams
    step.shared[PREDICTIONS] = predictions
    return np.asarray(predictions[:, 0] - h)
