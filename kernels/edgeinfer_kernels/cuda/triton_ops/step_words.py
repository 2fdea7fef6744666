"""What kernels read of the int32 words of a decode step or of a chunk: see `cuda_buffers.py`; and
what follows from a position; limits and slopes of heads.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.caches.layer_cache import LANES
from edgeinfer_kernels.cpu.runtime.abi import RECENT_PAGES
from edgeinfer_kernels.sizes import cuda_buffers

POSITIONS_AT = tl.constexpr(cuda_buffers.POSITIONS_AT)
MASKS_AT = tl.constexpr(cuda_buffers.MASKS_AT)
CACHED_AT = tl.constexpr(cuda_buffers.CACHED_AT)
SEQUENCES_AT = tl.constexpr(cuda_buffers.SEQUENCES_AT)
SEQUENCE_WORDS = tl.constexpr(cuda_buffers.SEQUENCE_WORDS)
FIRST_BIT = tl.constexpr(cuda_buffers.FIRST_BIT)
PAGE = tl.constexpr(LANES)
"""Positions of a page of the cache."""
RECENT_BEFORE = tl.constexpr(RECENT_PAGES - 1)
"""Pages before its own that a token reads in f16, if the cache has recent positions."""


@triton.jit
def step_start(words):
    """The first position of a step, or of a chunk."""
    return tl.load(words + SEQUENCES_AT)


@triton.jit
def step_pending(words):
    """Number of positions between the source slot's and the step."""
    return tl.load(words + (SEQUENCES_AT + 1))


@triton.jit
def step_source(words):
    return tl.load(words + (SEQUENCES_AT + 2)).to(tl.int64)


@triton.jit
def step_target(words):
    return tl.load(words + (SEQUENCES_AT + 3)).to(tl.int64)


@triton.jit
def step_tokens(words):
    """Number of tokens of a step, without padding."""
    return tl.load(words + (SEQUENCES_AT + 4))


@triton.jit
def step_ring(words):
    """The first row of a sequence in the rings of recurrent states."""
    return tl.load(words + (SEQUENCES_AT + 5))


@triton.jit
def first_of_sequence(words, token):
    """The first token of a step that belongs to the sequence of `token`, in a batch."""
    return tl.load(words + MASKS_AT + token) >> FIRST_BIT


@triton.jit
def own_words(words, IS_BATCH: tl.constexpr):
    """The words of a program's sequence: in a batch program_id(2)."""
    if IS_BATCH:
        words += tl.program_id(2) * SEQUENCE_WORDS
    return words


@triton.jit
def own_row(rows, stride, IS_BATCH: tl.constexpr):
    """The rows of a program's sequence: in a batch one for each, `stride` apart."""
    if IS_BATCH:
        rows += tl.program_id(2).to(tl.int64) * stride
    return rows


@triton.jit
def clamped(values, LIMIT: tl.constexpr):
    """The values within ± LIMIT; 0: no limit."""
    if LIMIT > 0:
        values = tl.minimum(tl.maximum(values, -LIMIT), LIMIT)
    return values


@triton.jit
def head_slopes(slopes, head, HAS_ALIBI: tl.constexpr):
    """The slopes of ALiBi of some query heads; 0 without."""
    found = tl.zeros(head.shape, tl.float32)
    if HAS_ALIBI:
        found = tl.load(slopes + head)
    return found


@triton.jit
def scaled_queries(queries, weights, position, CONFIG: tl.constexpr):
    """Queries (n, DIMENSIONS) times `weights`, and times the factor of their positions."""
    if CONFIG.has_query_weights:
        dimension = tl.arange(0, CONFIG.dimensions)[None, :]
        queries *= tl.load(weights + dimension, mask=dimension < CONFIG.head_dim, other=0.0)
    return with_temperature(queries, position, CONFIG)


@triton.jit
def with_temperature(queries, position, CONFIG: tl.constexpr):
    """Queries times the factor of their positions, as in `Temperature`."""
    if CONFIG.temperature != 0.0:
        LENGTH: tl.constexpr = CONFIG.temperature_length
        number = (position + CONFIG.temperature_offset) // LENGTH
        queries *= 1.0 + CONFIG.temperature * tl.log(1.0 + number.to(tl.float32))
    return queries


@triton.jit
def oldest_visible(position, window, CHUNKED: tl.constexpr):
    """The first position in the window of a token at `position`; may be negative."""
    if CHUNKED:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def recent_from(position):
    """The first position that a token at `position` reads in f16: that of the page two before its own."""
    return tl.maximum(position // PAGE - RECENT_BEFORE, 0) * PAGE


@triton.jit
def read_in_cache(cached, count, HAS_RECENT: tl.constexpr):
    """The end of the positions that some of `count` tokens after `cached` ones read in the cache; later ones
    are recent positions of all of them.
    """
    end = cached
    if HAS_RECENT:
        end = tl.minimum(recent_from(cached + count - 1), cached)
    return end


@triton.jit
def split_range(
    cached, end, split, SPLITS: tl.constexpr, POSITIONS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):  # fmt: skip
    """The first and last position of a split of those before `end`, and the number of non-empty splits: the
    first has positions, or the step's new tokens. Splits consist of whole tiles; none begins before the
    window of the first new token, at `cached`.
    """
    oldest = cached * 0
    if WINDOW > 0:
        oldest = tl.maximum(oldest_visible(cached, WINDOW, CHUNKED), 0)
    count = tl.maximum(end - oldest, 0)
    length = tl.cdiv(tl.cdiv(count, SPLITS), POSITIONS) * POSITIONS
    first = oldest + split * length
    used = tl.where(length > 0, tl.cdiv(count, tl.maximum(length, 1)), 1)
    return first, tl.minimum(first + length, end), used
