"""A layer's cache without some positions in its middle: what lies behind moves up, and keys turn back.

Keys are kept rotated by their positions; moving one by so many positions rotates it by as many more or fewer,
as rotations add. Source: Su et al. 2021, "RoFormer", §3.2; Xiao et al. 2023, "StreamingLLM", §3.2.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.reference.backend import turn
from edgeinfer_kernels.specification import AttentionSpecification

POSITIONS_AT_ONCE = 1024


def check_gone(gone: npt.NDArray[np.int64], end: int) -> None:
    """Raises `ValueError`: some of `gone` aren't there, or they don't rise."""
    if len(gone) == 0 or gone[0] < 0 or gone[-1] >= end or (np.diff(gone) <= 0).any():
        raise ValueError(f"saw positions {gone[:3]}… to forget, wanted rising ones of {end}")


def forget(cache: LayerCache, facts: AttentionSpecification, gone: npt.NDArray[np.int64], end: int) -> None:
    """Forget positions `gone` (rising); the others up to `end` move together, a thousand at a time.

    Keys that move are widened, turned and rounded once more; values and scales move as they are.

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
