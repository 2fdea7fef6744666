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
def store_cache_rows(
    base,
    scales,
    rows,
    rows_mask,
    values,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """Put values (N, DIMENSIONS) float32, 0 beyond HEAD_DIM, at rows (N,) int64: head · positions + position.

    What a float16 can't hold is held at ±65504. Writes rows · HEAD_DIM · 2 bytes, or rows · HEAD_DIM · 17/16.
    """
    COUNT: tl.constexpr = values.shape[0]
    dimensions = tl.arange(0, DIMENSIONS)
    mask = rows_mask[:, None] & (dimensions < HEAD_DIM)[None, :]
    to = base + rows[:, None] * HEAD_DIM + dimensions[None, :]
    if QUANTISED:
        GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
        SLOTS: tl.constexpr = (DIMENSIONS + 31) // 32
        grouped = tl.reshape(values, (COUNT, SLOTS, DIMENSIONS // SLOTS))
        scale = tl.minimum(tl.max(tl.abs(grouped), axis=2) / 127.0, 65504.0).to(tl.float16)
        # Divided by the scale that is stored; where that is too small for a float16, the group becomes 0.
        used = scale.to(tl.float32)[:, :, None]
        steps = tl.where(used > 0, grouped / tl.where(used > 0, used, 1.0), 0.0)
        steps = tl.minimum(tl.maximum(tl.floor(steps + 0.5), -127.0), 127.0)
        tl.store(to, tl.reshape(steps, (COUNT, DIMENSIONS)).to(tl.int8), mask=mask)
        group = tl.arange(0, SLOTS)
        scales_mask = rows_mask[:, None] & (group < GROUPS)[None, :]
        tl.store(scales + rows[:, None] * GROUPS + group[None, :], scale, mask=scales_mask)
    else:
        tl.store(to, tl.minimum(tl.maximum(values, -65504.0), 65504.0).to(tl.float16), mask=mask)
