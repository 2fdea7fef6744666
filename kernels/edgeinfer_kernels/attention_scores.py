"""Attention scores of cached tokens, summed over the last tokens of a text. Cache eviction uses them.

A decode step does not accumulate attention weights, because that would slow down every token. Instead, the
last tokens are evaluated a second time when tokens must be evicted.
Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; Li et al. 2024, "SnapKV", §4 (observation window).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, AskingBackend
from edgeinfer_kernels.cache_formats import rotated
from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.reference.backend import attention_weights


def attention_votes(
    backend: AskingBackend, caches: Sequence[LayerCache], x: Activations, start: int
) -> npt.NDArray[np.float64]:
    """Attention weight that each position receives from tokens at start…: (start + len(x),) float64.

    The weights are summed over these tokens, all heads and all layers. `x` are the embeddings of the tokens;
    their keys and values are written to the caches again.
    """
    end = start + len(x)
    votes = np.zeros(end)
    for index, (layer, given, cache) in enumerate(
        zip(backend.specification.layers, backend.weights.layers, caches, strict=True)
    ):
        facts = layer.attention
        backend.attention_block(index, x, start)
        queries = backend.queries(index, len(x))
        keys = cache.read_keys(0, end, facts.head_dim).astype(np.float32)
        asked = rotated(queries) if cache.has_rotated_heads else queries
        for seen in attention_weights(asked, keys, start, facts, given.attention.attn_sinks):
            votes += seen.sum(axis=0)
        backend.feed_forward_block(index, x)
    return votes
