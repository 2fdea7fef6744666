"""Attention scores of cached tokens, summed over the last tokens of a text. Context shift uses them.

A decode step does not accumulate attention weights, because that would slow down every token. Instead, the
last tokens are evaluated a second time when tokens must be evicted.
Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; Li et al. 2024, "SnapKV", §4 (observation window).
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.attention import AttentionState
from edgeinfer_kernels.cache_formats import hadamard_rows
from edgeinfer_kernels.reference.blocks.attention import attention_weights

if TYPE_CHECKING:
    from edgeinfer_kernels.backend import Activations
    from edgeinfer_kernels.cpu.backend import CpuBackend


def attention_scores(backend: "CpuBackend", x: "Activations", start: int) -> npt.NDArray[np.float64]:
    """As `Backend.attention_scores`; the keys and values of x are written to the caches again."""
    end = start + len(x)
    scores = np.zeros(end)
    for index in backend.spec.indices():
        backend.run_block(index, x, start)
        state = backend.state.get(index)
        if not isinstance(state, AttentionState):
            continue
        spec, cache = state.spec, state.cache
        queries = backend.queries(index, len(x))
        keys = cache.read_keys(0, end, spec.head_dim).astype(np.float32)
        basis = hadamard_rows(queries) if cache.has_hadamard_heads else queries
        sinks = backend.weights.residual(index).block.attn_sinks
        for weights in attention_weights(basis, keys, start, spec, sinks):
            scores += weights.sum(axis=0)
    return scores
