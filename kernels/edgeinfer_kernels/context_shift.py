"""Eviction from a layer's cache: later entries are moved up, and their keys get the RoPE of the new position.

Keys are cached after RoPE. Moving a key by n positions applies a RoPE of n positions more, because RoPE
angles add. Source: Su et al. 2021, "RoFormer", §3.2; Xiao et al. 2023, "StreamingLLM", §3.2.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.reference.backend import turn
from edgeinfer_kernels.specification import AttentionSpecification

POSITIONS_AT_ONCE = 1024


def check_gone(gone: npt.NDArray[np.int64], end: int) -> None:
    """Raise `ValueError` if some of `gone` do not exist or are not ascending."""
    if len(gone) == 0 or gone[0] < 0 or gone[-1] >= end or (np.diff(gone) <= 0).any():
        raise ValueError(f"saw positions {gone[:3]}… to forget, wanted rising ones of {end}")


def forget(cache: LayerCache, facts: AttentionSpecification, gone: npt.NDArray[np.int64], end: int) -> None:
    """Evict positions `gone` (ascending) and compact the others up to `end`, in chunks of about a thousand.

    Moved keys are dequantized, get RoPE and are quantized again. Values and scales are moved unchanged.

    Raises what `check_gone` raises.
    """
    check_gone(gone, end)
    kept = np.setdiff1d(np.arange(gone[0], end), gone, assume_unique=True)
    rope = replace(facts.rope, magnitude=1.0) if facts.rope else None
    table = rope.table(-len(gone), len(gone)) if rope else None
    for begin in range(0, len(kept), POSITIONS_AT_ONCE):
        source = kept[begin : begin + POSITIONS_AT_ONCE]
        first = int(gone[0]) + begin
        cache.move(source, first)
        if rope is None or table is None:
            continue
        distance = source - np.arange(first, first + len(source))
        keys = cache.read_keys(first, first + len(source), facts.head_dim).astype(np.float32)
        cache.write_keys(first, turn(keys, rope, table[len(gone) - distance]).swapaxes(0, 1))
