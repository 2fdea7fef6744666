"""A layer's cache without some positions in its middle: what lies behind moves up, and keys turn back.

Keys are kept rotated by their positions; moving one by so many positions rotates it by as many more or fewer,
as rotations add. Source: Su et al. 2021, "RoFormer", §3.2; Xiao et al. 2023, "StreamingLLM", §3.2.
"""

from dataclasses import replace

import numpy as np

from edgeinfer_kernels.layer_cache import LANES, LayerCache
from edgeinfer_kernels.reference.backend import turn
from edgeinfer_kernels.specification import AttentionSpecification

POSITIONS_AT_ONCE = 1024


def check_slide(keep: int, dropped: int, end: int) -> None:
    """Raises `ValueError`: `dropped` isn't whole tiles of 16, or there is not so much."""
    if dropped <= 0 or dropped % LANES or keep + dropped > end:
        raise ValueError(
            f"{dropped} positions behind {keep} of {end}: wanted whole sixteens of what is there"
        )


def slide(cache: LayerCache, facts: AttentionSpecification, keep: int, dropped: int, end: int) -> None:
    """Forget `dropped` positions behind the first `keep`; those up to `end` move to where these lay.

    Keys are widened, turned and rounded once more; values and scales move as they are. Moves
    (end - keep - dropped) positions, a thousand widened keys at a time beside the cache.

    Raises what `check_slide` raises.
    """
    check_slide(keep, dropped, end)
    _move_tiles(cache, keep, dropped, end)
    for begin in range(keep, end - dropped, dropped):
        stop = min(begin + dropped, end - dropped)
        cache.values[:, begin:stop] = cache.values[:, begin + dropped : stop + dropped]
    if facts.rope is None:
        return
    rope = replace(facts.rope, magnitude=1.0)
    table = rope.table(-dropped, 1)
    for begin in range(keep, end - dropped, POSITIONS_AT_ONCE):
        stop = min(begin + POSITIONS_AT_ONCE, end - dropped)
        keys = cache.read_keys(begin, stop, facts.head_dim).astype(np.float32)
        cache.write_keys(begin, turn(keys, rope, table).swapaxes(0, 1))


def _move_tiles(cache: LayerCache, keep: int, dropped: int, end: int) -> None:
    """Keys and scales: the lanes behind the kept ones of the tile in which they end, then whole tiles."""
    first, last, tiles = keep // LANES, -(-(end - dropped) // LANES), dropped // LANES
    for part in cache.parts():
        part[:, first, :, keep % LANES :] = part[:, first + tiles, :, keep % LANES :]
        for begin in range(first + 1, last, tiles):
            stop = min(begin + tiles, last)
            part[:, begin:stop] = part[:, begin + tiles : stop + tiles]
