"""The end of a layer in numpy."""

import numpy as np

from edgeinfer_kernels.reference.blocks.feed_forward import activate
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize

PER_LAYER_ROWS, PER_LAYER_INPUTS = "per-layer embeddings", "per-layer inputs"
"""Names of shared results: the rows of the per-layer embeddings, and the per-layer inputs."""


def per_layer_inputs(step: BlockStep, x: Array) -> Array:
    """(tokens, layers, width): the per-layer inputs of tokens with the embeddings x."""
    spec, w = step.spec, step.weights
    shape = len(x), spec.layers, spec.width
    rows = step.shared[PER_LAYER_ROWS].reshape(shape) * np.sqrt(spec.width)
    projected = step.times(x, w.model_proj).reshape(shape) / np.sqrt(x.shape[1])
    return np.asarray((normalize(projected, spec.norm, w.proj_norm) + rows) / np.sqrt(2))


def normed_result(step: BlockStep, x: Array) -> Array:
    """The norm of the gated per-layer input of x, projected back."""
    spec, w = step.spec, step.weights
    if spec.is_first:
        step.shared[PER_LAYER_INPUTS] = per_layer_inputs(step, step.layer_input)
    inputs = step.shared[PER_LAYER_INPUTS][:, spec.layer]
    projected = step.times(activate(step.times(x, w.inp_gate), spec.activation) * inputs, w.proj)
    return normalize(projected, spec.norm, w.post_norm)


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it becomes the layer's output."""
    spec, w = step.spec, step.weights
    y = normed_result(step, h) if spec.width else 0.0
    return np.asarray(w.scale * (h + y) - h)
