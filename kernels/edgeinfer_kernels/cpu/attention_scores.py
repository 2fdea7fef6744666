"""Attention scores of cached tokens, summed over the last tokens of a text. Context shift uses them.

A decode step does not accumulate attention weights, because that would slow down every token. Instead, the
last tokens are evaluated a second time when tokens must be evicted.
Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; Li et al. 2024, "SnapKV", §4 (observation window).
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.attention import AttentionWeights
from edgeinfer_kernels.caches.cache_state import CacheState
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
        if not isinstance(state, CacheState):
            continue
        queries = state.in_key_basis(backend.decoder.queries(index, len(x)))
        block = backend.weights.residual(index).block
        sinks = block.attn_sinks if isinstance(block, AttentionWeights) else None
        for weights in attention_weights(queries, state.keys(end), start, state.spec, sinks):
            scores += weights.sum(axis=0)
    return scores
