"""How a layer's keys and values lie on the device, and tiles of them in and out of float16 or q8_0.

float16: (kv_heads, positions, head_dim). q8_0: int8 of that shape, and float16 scales (kv_heads, positions,
⌈head_dim/32⌉), each the absolute maximum of its 32 dimensions over 127.
"""

import triton
import triton.language as tl

QUANTISED_GROUP = tl.constexpr(32)


@triton.jit
def load_cache_tile(
    base,
    scales,
    head,
    rows,
    rows_mask,
    positions,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Rows `rows` (N,) of one head as float16 (N, DIMENSIONS); what is masked or beyond HEAD_DIM is 0.

    `base` is the whole layer's keys or values, `scales` its scales (unread unless QUANTISED), `positions`
    what the layer has room for. Reads rows · HEAD_DIM · 2 bytes, or rows · (HEAD_DIM + HEAD_DIM/16) if QUANTISED.
    """
    dimensions = tl.arange(0, DIMENSIONS)
    row = head.to(tl.int64) * positions + rows
    if DIMENSIONS == HEAD_DIM:
        mask = rows_mask[:, None]
    else:
        mask = rows_mask[:, None] & (dimensions < HEAD_DIM)[None, :]
    tile = tl.load(base + row[:, None] * HEAD_DIM + dimensions[None, :], mask=mask, other=0)
    if QUANTISED:
        GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
        group = (dimensions // QUANTISED_GROUP)[None, :]
        scale = tl.load(scales + row[:, None] * GROUPS + group, mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * scale.to(tl.float32)).to(tl.float16)
    return tile


@triton.jit
def store_cache_row(
    base,
    scales,
    head,
    position,
    values,
    positions,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Append one position of one head: values (DIMENSIONS,) float32, 0 beyond HEAD_DIM; quantised on the way.

    A float16 that would overflow is held at ±65504. Writes HEAD_DIM · 2 bytes, or HEAD_DIM · 17/16.
    """
    dimensions = tl.arange(0, DIMENSIONS)
    row = head.to(tl.int64) * positions + position
    mask = dimensions < HEAD_DIM
    values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    if QUANTISED:
        GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
        SLOTS: tl.constexpr = (DIMENSIONS + 31) // 32
        WIDE: tl.constexpr = DIMENSIONS // SLOTS
        grouped = tl.reshape(values, (SLOTS, WIDE))
        scale = (tl.max(tl.abs(grouped), axis=1) / 127.0).to(tl.float16)
        # Divided by the scale that is stored; one too small for a float16 makes the group 0.
        used = scale.to(tl.float32)[:, None]
        steps = tl.where(used > 0, grouped / tl.where(used > 0, used, 1.0), 0.0)
        steps = tl.minimum(tl.maximum(tl.floor(steps + 0.5), -127.0), 127.0)
        tl.store(base + row * HEAD_DIM + dimensions, tl.reshape(steps, (DIMENSIONS,)).to(tl.int8), mask=mask)
        group = tl.arange(0, SLOTS)
        tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)
    else:
        tl.store(base + row * HEAD_DIM + dimensions, values.to(tl.float16), mask=mask)
