"""The norm of the embedding in numpy."""

from edgeinfer_kernels.reference.step import Array, BlockStep, normalize


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): what is added to x so that it is normalized."""
    return normalize(h, step.spec.norm, step.weights.weight, step.weights.bias) - h
