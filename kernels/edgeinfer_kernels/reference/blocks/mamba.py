"""Mamba-1 in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.mamba import MambaSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, silu, softplus


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_out (y · silu(W_z h)), where y are the results of the recurrence."""
    spec, w, state = step.spec, step.weights, step.state
    width, channels, size = padded(spec.channels), spec.channels, spec.state_size
    rows = np.zeros((len(h), 2 * width + padded(size)), h.dtype)
    rows[:, :channels] = step.times(h, w.x)
    history = np.concatenate([state.before(step.recurrent, step.start), rows[:, :width]])[:, :channels]
    count = len(history) - spec.taps + 1
    conv = sum(w.taps[tap] * history[tap : tap + count].astype(step.dtype) for tap in range(spec.taps))
    inputs = silu(conv + w.taps_bias)
    u = inputs[count - len(h) :]
    norm = NormSpec("rms", spec.norm.epsilon)
    dt, b, c = (
        normalize(step.times(u, matrix), norm, weight)
        for matrix, weight in ((w.dt, w.dt_norm), (w.b, w.b_norm), (w.c, w.c_norm))
    )
    rows[:, width : width + channels] = softplus(step.times(dt, w.delta, w.dt_bias))
    rows[:, 2 * width : 2 * width + size] = b
    pending = state.pending_rows(step.recurrent, step.start).astype(step.dtype)
    every = np.concatenate([pending, rows])
    deltas, keys = every[:, width : width + channels], every[:, 2 * width : 2 * width + size]
    matrix = _unpacked(state.matrix(step.recurrent, step.start), spec).astype(step.dtype)
    out = np.empty((len(h), channels), h.dtype)
    for index, (delta, key) in enumerate(zip(deltas, keys, strict=True)):
        matrix = np.exp(delta[:, None] * w.a) * matrix + (delta * inputs[index])[:, None] * key
        if index >= len(pending):
            out[index - len(pending)] = matrix @ c[index - len(pending)]
    state.write(step.recurrent, step.start, rows, _packed(matrix, spec))
    return step.times((out + w.skip * u) * silu(step.times(h, w.z)), w.output)


def _unpacked(matrix: Array, spec: MambaSpec) -> Array:
    """The state (channels, state_size) from its layout in a slot."""
    return (
        matrix.reshape(-1, spec.state_size, 16).swapaxes(1, 2).reshape(-1, spec.state_size)[: spec.channels]
    )


def _packed(matrix: Array, spec: MambaSpec) -> Array:
    """The inverse of `_unpacked`."""
    wide = np.pad(matrix, ((0, padded(spec.channels) - spec.channels), (0, 0)))
    return wide.reshape(-1, 16, spec.state_size).swapaxes(1, 2)
