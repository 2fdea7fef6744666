"""The layout of a layer's KV cache on the device, and load and store of tiles in float16, FP8, q8_0 or
q4_0.

float16: (kv_heads, positions, head_dim). FP8: bytes of that shape (`cache_formats.to_fp8`). q8_0: int8 of
that shape, and float16 scales (kv_heads, positions, ⌈head_dim/32⌉), each the absolute maximum of its 32
dimensions over 127. q4_0: heads in the Hadamard basis (`cache_formats.hadamard_rows`), codes -8…7 plus 8,
eight per word, int32 (kv_heads, positions, ⌈head_dim/8⌉), the even dimensions in its low 16 bits; and scales,
each the element of largest magnitude of its 32 over -8.
"""

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import USES_PTX
from edgeinfer_kernels.cuda.triton_ops.step_words import PAGE
from edgeinfer_kernels.cuda.triton_ops.words import masked_or, select_bytes

F16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
Q8_0 = tl.constexpr(2)
Q4_0 = tl.constexpr(3)
CACHES = {torch.float16: F16, torch.int8: Q8_0, torch.int32: Q4_0, torch.uint8: FP8}
"""The value of a kernel constant such as CACHE, by the dtype of the cache elements; from Q8_0 on they have
scales.
"""
NO_CODES = tl.constexpr(-0x77777778)
"""A word of eight zeros."""
F16_1024 = tl.constexpr(0x64006400)
"""With codes in the lowest bits of both 16-bit parts, this is 1024 + code as float16; a conversion takes four
times as long.
"""
BYTES_RAISED = tl.constexpr(-0x7F7F7F80)
"""Exclusive or with this converts four int8 to bytes, each plus 128."""


@triton.jit
def hadamard(x, HEAD_DIM: tl.constexpr):
    """Heads (n, DIMENSIONS) float32 times the orthonormal Hadamard matrix; applied twice, it is the identity.

    The block size is the largest power of two that divides HEAD_DIM. Each step computes sums and differences
    of neighbors, and stores the sums in the first half of the block; after the last step all elements are in
    order.
    """
    ROWS: tl.constexpr = x.shape[0]
    DIMENSIONS: tl.constexpr = x.shape[1]
    BLOCK: tl.constexpr = HEAD_DIM & -HEAD_DIM
    BLOCKS: tl.constexpr = DIMENSIONS // BLOCK
    for bit in tl.static_range(10):
        if (1 << bit) < BLOCK:
            a, b = tl.split(tl.reshape(x, (ROWS, BLOCKS, BLOCK // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, DIMENSIONS))
    return x * BLOCK**-0.5


@triton.jit
def _signs(BLOCK: tl.constexpr):
    """Unscaled Hadamard matrices of BLOCK along the diagonal of a (16, 16) float16 matrix."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    ones = row & column & (BLOCK - 1)
    ones = ones ^ (ones >> 2)
    ones = ones ^ (ones >> 1)
    signs = tl.where(row // BLOCK == column // BLOCK, 1.0 - 2.0 * (ones & 1).to(tl.float32), 0.0)
    return signs.to(tl.float16)


@triton.jit
def hadamard_f16(x, HEAD_DIM: tl.constexpr):
    """As `hadamard`, in float16 with intermediate rounding: uses tensor cores, in fewer steps for many rows.

    A block consists of groups of sixteen dimensions. First each group is multiplied with the matrix of its
    sixteen elements. Then the elements at the same index of all groups are multiplied, packed to sixteen
    again. A block of more than sixteen groups is transformed as in `hadamard`.
    """
    ROWS: tl.constexpr = x.shape[0]
    DIMENSIONS: tl.constexpr = x.shape[1]
    SIXTEENS: tl.constexpr = ROWS * DIMENSIONS // 16
    if SIXTEENS < 16 or (HEAD_DIM & -HEAD_DIM) > 256:
        x = hadamard(x, HEAD_DIM)
    else:
        BLOCK: tl.constexpr = HEAD_DIM & -HEAD_DIM
        INNER: tl.constexpr = BLOCK if BLOCK < 16 else 16
        OUTER: tl.constexpr = BLOCK // INNER
        PACKED: tl.constexpr = 16 // OUTER
        x = tl.dot(tl.reshape(x.to(tl.float16), (SIXTEENS, 16)), _signs(INNER)) * INNER**-0.5
        if OUTER > 1:
            x = tl.permute(tl.reshape(x, (SIXTEENS // OUTER, OUTER, PACKED, OUTER)), (0, 3, 2, 1))
            x = tl.dot(tl.reshape(x.to(tl.float16), (SIXTEENS, 16)), _signs(OUTER)) * OUTER**-0.5
            x = tl.permute(tl.reshape(x, (SIXTEENS // OUTER, OUTER, PACKED, OUTER)), (0, 3, 2, 1))
        x = tl.reshape(x, (ROWS, DIMENSIONS))
    return x.to(tl.float16)


@triton.jit
def ring_rows(positions, first, capacity, IS_RING: tl.constexpr):
    """The cache rows of positions (n,) from `first` on, fewer than the cache has: if IS_RING, position p is
    at row p % capacity.
    """
    rows = positions
    if IS_RING:
        rows = positions - first // capacity * capacity
        rows = tl.where(rows < capacity, rows, rows - capacity)
    return rows


@triton.jit
def cache_rows(positions, first, inside, cache, pages, CONFIG: tl.constexpr):
    """The cache rows of positions (n,) from `first` on, where `inside`: in the pages of their sequence if the
    cache has pages, else as `ring_rows`.
    """
    if CONFIG.is_paged:
        page = tl.load(pages + positions // PAGE, mask=inside, other=0)
        return page * PAGE + positions % PAGE
    else:
        return ring_rows(positions, first, cache.capacity, CONFIG.is_ring)


@triton.jit
def prefetch_lines(pointers):
    """Request the cache lines of some pointers for the L2 cache."""
    if USES_PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_cache_rows(elements, head, rows, capacity, HEAD_DIM: tl.constexpr, CACHE: tl.constexpr):
    """Request the keys or values of a head in cache rows (n,) for the L2 cache, without scales."""
    ROW: tl.constexpr = (HEAD_DIM + 7) // 8 if CACHE == Q4_0 else HEAD_DIM
    LINE: tl.constexpr = 64 if CACHE == F16 else 32 if CACHE == Q4_0 else 128
    LINES: tl.constexpr = triton.next_power_of_2((ROW + LINE - 1) // LINE)
    at = (head.to(tl.int64) * capacity + rows) * ROW
    prefetch_lines(elements + at[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, ROW - 1)[None, :])


@triton.jit
def recent_rows(positions, inside, cache, pages, IS_PAGED: tl.constexpr):
    """The rows of positions (n,), where `inside`, in the recent positions of a cache."""
    page = positions // PAGE
    if IS_PAGED:
        page = tl.load(pages + page, mask=inside, other=0)
    return tl.load(cache.recent.slots + page, mask=inside, other=0) * PAGE + positions % PAGE


@triton.jit
def load_recent_tiles(positions, inside, cache, pages, head, CONFIG: tl.constexpr):
    """Keys (N, dimensions) and values (N, value_dimensions) of one head at recent positions (N,), as
    `load_cache_tile`.
    """
    rows = recent_rows(positions, inside, cache, pages, CONFIG.is_paged)
    keys = load_cache_tile(
        cache.recent.k, cache.recent.k, head, rows, inside, cache.recent.capacity, CONFIG.head_dim,
        CONFIG.dimensions, F16,
    )  # fmt: skip
    values = load_cache_tile(
        cache.recent.v, cache.recent.v, head, rows, inside, cache.recent.capacity, CONFIG.value_dim,
        CONFIG.value_dimensions, F16,
    )  # fmt: skip
    return keys, values


@triton.jit
def store_recent_rows(base, rows, rows_mask, values, HEAD_DIM: tl.constexpr, CACHE: tl.constexpr):
    """Store values (N, DIMENSIONS) float32 at rows (N,) int64 of recent positions, in the basis of a cache of
    type CACHE.
    """
    if CACHE == Q4_0:
        values = hadamard(values, HEAD_DIM)
    store_cache_rows(base, base, rows, rows_mask, values, HEAD_DIM, values.shape[1], F16)


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
    CACHE: tl.constexpr,
):
    """Rows `rows` (N,) of one head as float16 (N, DIMENSIONS), for q4_0 in the Hadamard basis; masked
    elements and those beyond HEAD_DIM are 0.

    `base` is the whole layer's keys or values, `scales` its scales (not read without), `positions` the
    capacity of the layer. Reads HEAD_DIM · 2 bytes per row, HEAD_DIM for FP8, HEAD_DIM · 17/16 for q8_0,
    HEAD_DIM · 9/16 for q4_0.
    """
    row = head.to(tl.int64) * positions + rows
    if CACHE == Q4_0:
        WORDS: tl.constexpr = (HEAD_DIM + 7) // 8
        word = tl.arange(0, DIMENSIONS // 8)
        at = base + row[:, None] * WORDS + word[None, :]
        if DIMENSIONS == HEAD_DIM:
            words = tl.load(at, mask=rows_mask[:, None], other=0)
        else:
            words = tl.load(at, mask=rows_mask[:, None] & (word < WORDS)[None, :], other=NO_CODES)
        tile = tl.reshape(_eight_codes(words), (rows.shape[0], DIMENSIONS))
    elif CACHE != F16 and HEAD_DIM % 4 == 0:
        quarter = tl.arange(0, DIMENSIONS // 4)
        held = rows_mask[:, None] & (quarter < HEAD_DIM // 4)[None, :]
        words = tl.load(
            base.to(tl.pointer_type(tl.int32)) + row[:, None] * (HEAD_DIM // 4) + quarter[None, :],
            mask=held,
            other=0,
        )
        if CACHE == FP8:
            tile = tl.reshape(_four_fp8(words), (rows.shape[0], DIMENSIONS))
        else:
            tile = tl.reshape(_four_codes(words), (rows.shape[0], DIMENSIONS))
    else:
        dimensions = tl.arange(0, DIMENSIONS)
        if DIMENSIONS == HEAD_DIM:
            mask = rows_mask[:, None]
        else:
            mask = rows_mask[:, None] & (dimensions < HEAD_DIM)[None, :]
        tile = tl.load(base + row[:, None] * HEAD_DIM + dimensions[None, :], mask=mask, other=0)
        if CACHE == FP8:
            tile, _ = _both_f16(_fp8_bits(tile.to(tl.int32)))
            tile = tile * 256.0
    if CACHE >= Q8_0:
        tile = _scaled(tile.to(tl.float16), scales, row, rows_mask, HEAD_DIM)
    return tile


@triton.jit
def _eight_codes(words):
    """The codes of words (n, m), minus 8, as float16 (n, m, 2, 2, 2)."""
    low_0, high_0 = _two_codes(words)
    low_1, high_1 = _two_codes(words >> 4)
    low_2, high_2 = _two_codes(words >> 8)
    low_3, high_3 = _two_codes(words >> 12)
    even = tl.join(tl.join(low_0, low_2), tl.join(low_1, low_3))
    odd = tl.join(tl.join(high_0, high_2), tl.join(high_1, high_3))
    return tl.join(even, odd) - 1032.0


@triton.jit
def _two_codes(words):
    """1024 plus the code in the lowest bits of either 16-bit part, as float16."""
    return _both_f16(masked_or(words, 0x000F000F, F16_1024))


@triton.jit
def _four_codes(words):
    """The int8 of words (n, m) as float16 (n, m, 2, 2)."""
    raised, zero = words ^ BYTES_RAISED, tl.zeros_like(words)
    first, second = _both_f16(select_bytes(raised, zero + F16_1024, zero + 0x5150))
    third, fourth = _both_f16(select_bytes(raised, zero + F16_1024, zero + 0x5352))
    return tl.join(tl.join(first, third), tl.join(second, fourth)) - 1152.0


@triton.jit
def _four_fp8(words):
    """The FP8 elements of words (n, m) as float16 (n, m, 2, 2)."""
    first, third = _both_f16(_fp8_bits(words))
    second, fourth = _both_f16(_fp8_bits(words >> 8))
    return tl.join(tl.join(first, third), tl.join(second, fourth)) * 256.0


@triton.jit
def _fp8_bits(words):
    """The FP8 element in the low byte of either 16-bit part as float16 bits, whose bias is 8 more."""
    return ((words & 0x00800080) << 8) | ((words & 0x007F007F) << 7)


@triton.jit
def _to_fp8(x):
    """Float32 as the bits of FP8, as `cache_formats.to_fp8`, in int32."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - 960
    # Adding 1.5 · 2²³ rounds to the nearest integer: the code of a number below 2⁻⁵.
    steps = (magnitude * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.minimum(steps, tl.maximum(normal, 8))
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _both_f16(words):
    """The float16 in the low 16 bits of words, and in the high 16 bits."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _scaled(codes, scales, row, rows_mask, HEAD_DIM: tl.constexpr):
    """Codes (N, DIMENSIONS) float16 times the scales of their groups, correctly rounded."""
    ROWS: tl.constexpr = codes.shape[0]
    DIMENSIONS: tl.constexpr = codes.shape[1]
    GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
    SLOTS: tl.constexpr = (DIMENSIONS + 31) // 32
    group = tl.arange(0, SLOTS)
    mask = rows_mask[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(scales + row[:, None] * GROUPS + group[None, :], mask=mask, other=0.0)
    grouped = tl.reshape(codes, (ROWS, SLOTS, DIMENSIONS // SLOTS)) * scale[:, :, None]
    return tl.reshape(grouped, (ROWS, DIMENSIONS))


@triton.jit
def store_cache_rows(
    base,
    scales,
    rows,
    rows_mask,
    values,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Store values (N, DIMENSIONS) float32, 0 beyond HEAD_DIM, at rows (N,) int64: head · positions +
    position.

    Values outside the range of float16 or FP8 are clamped. Writes as many bytes as `load_cache_tile` reads.
    """
    COUNT: tl.constexpr = values.shape[0]
    dimensions = tl.arange(0, DIMENSIONS)
    mask = rows_mask[:, None] & (dimensions < HEAD_DIM)[None, :]
    to = base + rows[:, None] * HEAD_DIM + dimensions[None, :]
    if CACHE == F16:
        tl.store(to, tl.minimum(tl.maximum(values, -65504.0), 65504.0).to(tl.float16), mask=mask)
    elif CACHE == FP8:
        tl.store(to, _to_fp8(values).to(tl.uint8), mask=mask)
    else:
        GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
        SLOTS: tl.constexpr = (DIMENSIONS + 31) // 32
        if CACHE == Q4_0:
            values = hadamard(values, HEAD_DIM)
        grouped = tl.reshape(values, (COUNT, SLOTS, DIMENSIONS // SLOTS))
        if CACHE == Q4_0:
            highest, lowest = tl.max(grouped, axis=2), tl.min(grouped, axis=2)
            full = tl.where(highest > -lowest, highest, lowest) / -8.0
        else:
            full = tl.max(tl.abs(grouped), axis=2) / 127.0
        scale = tl.minimum(tl.maximum(full, -65504.0), 65504.0).to(tl.float16)
        # Divide by the stored scale; if it underflows in float16, the group becomes 0.
        used = scale.to(tl.float32)[:, :, None]
        steps = tl.floor(tl.where(used != 0, grouped / tl.where(used != 0, used, 1.0), 0.0) + 0.5)
        if CACHE == Q4_0:
            steps = tl.minimum(tl.maximum(steps, -8.0), 7.0) + 8.0
            WORDS: tl.constexpr = (HEAD_DIM + 7) // 8
            index = tl.arange(0, 8)
            codes = tl.reshape(steps.to(tl.int32), (COUNT, DIMENSIONS // 8, 8))
            words = tl.sum(codes << (index // 2 * 4 + index % 2 * 16)[None, None, :], axis=2)
            word = tl.arange(0, DIMENSIONS // 8)
            held = rows_mask[:, None] & (word < WORDS)[None, :]
            tl.store(base + rows[:, None] * WORDS + word[None, :], words, mask=held)
        else:
            steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
            tl.store(to, tl.reshape(steps, (COUNT, DIMENSIONS)).to(tl.int8), mask=mask)
        group = tl.arange(0, SLOTS)
        scales_mask = rows_mask[:, None] & (group < GROUPS)[None, :]
        tl.store(scales + rows[:, None] * GROUPS + group[None, :], scale, mask=scales_mask)
