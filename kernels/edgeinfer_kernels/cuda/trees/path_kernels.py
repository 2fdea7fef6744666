"""The kernels that move the tokens of an accepted path of a draft tree to the positions after the text.

The words from PATH_AT on are the first position of the tree's step, and for each token of the path its row of
the step. A token moves to a lower row, or not at all.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.cache_tiles import ring_rows
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers
from edgeinfer_kernels.sizes import cuda_buffers

PATH_AT = tl.constexpr(cuda_buffers.PATH_AT)
TOKENS = tl.constexpr(cuda_buffers.MAX_TOKENS)


@triton.jit
def _move(base, source, target, moved, first_column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK elements of the rows (n,) int64 of WIDTH elements, all of which are read before one is
    written.
    """
    column = first_column + tl.arange(0, BLOCK)
    inside = moved[:, None] & (column < WIDTH)[None, :]
    elements = tl.load(base + source[:, None] * WIDTH + column[None, :], mask=inside)
    tl.debug_barrier()
    tl.store(base + target[:, None] * WIDTH + column[None, :], elements, mask=inside)


@triton.jit
def keep_path_kernel(
    cache, words, KEYS: tl.constexpr, KEY_SCALES: tl.constexpr, VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr, IS_RING: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Move keys and values of a head; one program per head. The constants are the elements of a row of each
    tensor, 0: the type has no scales. Reads and writes a row per token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    first = tl.program_id(0).to(tl.int64) * cache.capacity
    token = tl.arange(0, TOKENS)
    start = tl.load(words + PATH_AT)
    row = tl.load(words + (PATH_AT + 1) + token)
    moved = row != token
    source = first + ring_rows(start + row, start, cache.capacity, IS_RING)
    target = first + ring_rows(start + token, start, cache.capacity, IS_RING)
    _move(cache.k, source, target, moved, 0, KEYS, triton.next_power_of_2(KEYS))
    _move(cache.v, source, target, moved, 0, VALUES, triton.next_power_of_2(VALUES))
    if KEY_SCALES > 0:
        _move(cache.k_scales, source, target, moved, 0, KEY_SCALES, triton.next_power_of_2(KEY_SCALES))
    if VALUE_SCALES > 0:
        _move(cache.v_scales, source, target, moved, 0, VALUE_SCALES, triton.next_power_of_2(VALUE_SCALES))


@triton.jit
def keep_path_states_kernel(
    kept, words, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Move BLOCK columns of the states that are kept for a draft head, or of a recurrent state's rows, in a
    ring of ROWS.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.arange(0, TOKENS)
    start = tl.load(words + PATH_AT)
    row = tl.load(words + (PATH_AT + 1) + token)
    source, target = (start + row).to(tl.int64) % ROWS, (start + token).to(tl.int64) % ROWS
    _move(kept, source, target, row != token, tl.program_id(0) * BLOCK, WIDTH, BLOCK)
