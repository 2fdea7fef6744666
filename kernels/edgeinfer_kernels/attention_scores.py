"""How much the last tokens of a text look at each token before them: who looks much at it would miss it.

What a decoder step computes anyway isn't kept: summing weights would slow every token. The last tokens are
read once more instead, when something has to go.
Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle"; Li et al. 2024, "SnapKV", §4 (a window that votes).
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
    """(start + len(x),): the attention that each position gets from tokens at start…, summed over these, all
    heads and all layers. Their embeddings `x` are read again; their keys and values are written again.
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
