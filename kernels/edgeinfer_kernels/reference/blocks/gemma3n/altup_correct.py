"""AltUp after a layer in numpy."""

from dataclasses import replace

import numpy as np

from edgeinfer_kernels.reference.blocks.gemma3n.altup_predict import (
    PREDICTIONS,
    STREAMS,
    length,
    modalities,
    with_length,
)
from edgeinfer_kernels.reference.blocks.layer_output import normed_result
from edgeinfer_kernels.reference.step import Array, BlockStep


def merged(step: BlockStep, streams: Array) -> Array:
    """(tokens, hidden_size): the mean of the streams of the last layer."""
    first = streams[:, 0]
    others = [
        with_length(step, streams[:, index], matrix, length(first))
        for index, matrix in enumerate(step.weights.merge, 1)
    ]
    return np.asarray(sum(others, first) / len(streams[0]))


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the corrected stream, or the mean of
    all.
    """
    spec, w = step.spec, step.weights
    predictions = step.shared[PREDICTIONS]
    coefs = 1 + modalities(step, h, w.router) @ w.coef.reshape(spec.streams, -1).T.astype(step.dtype)
    streams = predictions + coefs[:, :, None] * (h - predictions[:, 0])[:, None]
    output = replace(step, spec=spec.output, weights=w.output)
    streams[:, 1:] += normed_result(output, streams[:, 0] * w.scale)[:, None]
    step.shared[STREAMS] = streams
    return np.asarray((merged(step, streams) if spec.is_last else streams[:, 0]) - h)
