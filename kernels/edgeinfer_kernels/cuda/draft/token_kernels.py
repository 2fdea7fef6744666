"""The kernels that select a draft token from the logits of a head's step, and set the next step's token."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.sampling import NO_KEY, ids_of, logits_of, sorting_keys
from edgeinfer_kernels.cuda.draft.states.state_kernels import PATH_AT
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    CACHED_AT,
    MASKS_AT,
    POSITIONS_AT,
    SEQUENCES_AT,
    step_start,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


@triton.jit
def draft_slices_kernel(
    logits_rows, words, keys, masses, vocabulary, SLICE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The largest key of a slice of the last token's logits, and Σ exp(logit - largest); one program per
    slice. Reads SLICE · 4 bytes.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    piece = tl.program_id(0)
    row = (step_tokens(words) - 1).to(tl.int64)
    ids = piece * SLICE + tl.arange(0, SLICE)
    mask = ids < vocabulary
    logits = tl.load(logits_rows + row * vocabulary + ids, mask=mask, other=float("-inf"))
    tl.store(keys + piece, tl.max(sorting_keys(logits, ids, mask), axis=0))
    peak = tl.max(logits, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(masses + piece, tl.sum(tl.exp(logits - level), axis=0))


@triton.jit
def token_ids(rows, table, vocabulary, MAPPED: tl.constexpr):
    """The token ids of rows of the output; MAPPED: in a table, -1 if there is no such row."""
    if MAPPED:
        return tl.load(table + rows, mask=(rows >= 0) & (rows < vocabulary), other=-1)
    else:
        return rows


@triton.jit
def _set_next_step(words, following, token, repeated, back):
    """Make the last `repeated` tokens of the step of `words`, and this one, those of the next step, which
    begins `back` positions before the end of this one. They read the first rows of the head's own states.
    """
    start = step_start(words) + step_tokens(words) - back
    index = tl.arange(0, POSITIONS_AT)
    tokens = tl.load(words + index, mask=index < repeated, other=0)
    tl.debug_barrier()  # All threads have read the words.
    used = index <= repeated
    tl.store(following + index, tl.where(index == repeated, tl.maximum(token, 0), tokens), mask=used)
    tl.store(following + POSITIONS_AT + index, start + index, mask=used)
    tl.store(following + MASKS_AT + index, (2 << index) - 1, mask=used)
    tl.store(following + (PATH_AT + 1) + index, index, mask=used)
    tl.store(following + CACHED_AT, start)
    tl.store(following + SEQUENCES_AT, start)
    tl.store(following + (SEQUENCES_AT + 4), repeated + 1)


@triton.jit(do_not_specialize=["index", "repeated", "back", "slices"])
def draft_token_kernel(
    keys, masses, words, following, verified, table, ids, probs, index, repeated, back, vocabulary, ids_end,
    slices, SLICES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The id of the largest logit, the lowest among equals, and its softmax, to `ids` and `probs` at `index`,
    in memory that the host can read. The next step, of the words `following`, gets this token after the
    `repeated` last ones of this step, `back` positions before its end. The softmax is NaN if a logit is.
    `verified`: the words of the target's step, which gets the token too, or 0 where it isn't below `ids_end`.

    Reads slices · 12 bytes.
    """
    wait_for_producers(DEPENDENT)
    piece = tl.arange(0, SLICES)
    own = tl.load(keys + piece, mask=piece < slices, other=NO_KEY)
    mass = tl.load(masses + piece, mask=piece < slices, other=0.0)
    best = tl.max(own, axis=0)
    peak = logits_of(best)
    total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(logits_of(own) - peak)), axis=0)
    token = token_ids(ids_of(best), table, vocabulary, table is not None)
    tl.store(ids + index, token)
    tl.store(probs + index, 1.0 / total)
    if verified is not None:
        tl.store(verified + 1 + index, tl.where((token >= 0) & (token < ids_end), token, 0))
    _set_next_step(words, following, token, repeated, back)
    release_consumers(DEPENDENT)  # Attention reads the cached length of the next step before it waits.
