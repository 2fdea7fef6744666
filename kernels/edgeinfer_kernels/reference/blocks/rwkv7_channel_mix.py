"""The channel mixing of RWKV-7 in numpy."""

import numpy as np

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.reference.step import Array, BlockStep


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_v relu(W_k x)², where x is between h and that of the token before."""
    spec, w, state = step.spec, step.weights, step.state
    before = state.before(step.recurrent, step.start)[-1:, : spec.width]
    shifted = np.concatenate([before.astype(step.dtype), h[:-1]])
    rows = np.pad(h, ((0, 0), (0, padded(spec.width) - spec.width)))
    state.write(step.recurrent, step.start, rows)
    hidden = np.maximum(step.times(h + w.lerp * (shifted - h), w.key), 0)
    return step.times(hidden * hidden, w.value)
