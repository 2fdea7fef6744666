"""Gated short convolution in numpy."""

import numpy as np

from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): output(c · Σ taps[i] · (b · x of the position taps - 1 - i before)). The rows
    b · x are written to the state.
    """
    spec, w, rows = step.spec, step.weights, step.state.rows
    b, c, x = (step.times(h, matrix) for matrix in (w.b, w.c, w.x))
    product = b * x
    before = rows.before(step.start)[:, : spec.channels].astype(step.dtype)
    history = np.concatenate([before, product])
    summed = sum(w.taps[tap] * history[tap : tap + len(h)] for tap in range(spec.taps))
    rows.write(step.start, np.pad(product, ((0, 0), (0, rows.ring.shape[2] - spec.channels))))
    return step.times(c * summed, w.output)
