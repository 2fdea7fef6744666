"""Gated short convolution in numpy."""

import numpy as np

from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): output(c · Σ taps[i] · (b · x of the position taps - 1 - i before)). The rows
    b · x are written to the state.
    """
    spec, w, state = step.spec, step.weights, step.state
    b, c, x = (step.times(h, matrix) for matrix in (w.b, w.c, w.x))
    product = b * x
    before = state.before(step.recurrent, step.start)[-(spec.taps - 1) :, : spec.channels]
    history = np.concatenate([before.astype(step.dtype), product])
    summed = sum(w.taps[tap] * history[tap : tap + len(h)] for tap in range(spec.taps))
    padding = state.shape.row_width - spec.channels
    state.write(step.recurrent, step.start, np.pad(product, ((0, 0), (0, padding))))
    return step.times(c * summed, w.output)
