"""The kernels that select the most probable tokens after each token of a draft head's step, for a tree.

As for sampling, a candidate is one int64 key (`decode/sampling.py`). Probabilities are the softmax of
a power of the words times the logits.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.sampling import NO_KEY, ids_of, logits_of, sorting_keys
from edgeinfer_kernels.cuda.draft.token_kernels import token_ids
from edgeinfer_kernels.cuda.triton_ops.step_words import step_tokens
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers
from edgeinfer_kernels.sizes import cuda_buffers

POWER_AT = tl.constexpr(cuda_buffers.POWER_AT)
CANDIDATES = tl.constexpr(16)
"""How many tokens are selected after each."""


@triton.jit
def _power(words):
    return tl.load(words + POWER_AT).to(tl.float32, bitcast=True)


@triton.jit
def level_slices_kernel(
    logits_rows, words, keys, masses, vocabulary,
    SLICE: tl.constexpr, LAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The largest keys of a slice of a row of logits, falling, and Σ exp(power · (logit - largest)); program
    (slice, row). LAST: of the step's last token, as row 0. Reads SLICE · 4 bytes, writes 128.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    piece, row = tl.program_id(0), tl.program_id(1)
    slot = row * tl.num_programs(0) + piece
    if LAST:
        row = step_tokens(words) - 1
    ids = piece * SLICE + tl.arange(0, SLICE)
    mask = ids < vocabulary
    logits = tl.load(logits_rows + row.to(tl.int64) * vocabulary + ids, mask=mask, other=float("-inf"))
    peak = tl.max(logits, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(masses + slot, tl.sum(tl.exp(_power(words) * (logits - level)), axis=0))
    best = tl.topk(sorting_keys(logits, ids, mask), CANDIDATES)
    tl.store(keys + slot * CANDIDATES + tl.arange(0, CANDIDATES), best)


@triton.jit(do_not_specialize=["slices"])
def level_candidates_kernel(
    keys, masses, words, table, ids, probs, vocabulary, slices,
    SLICES: tl.constexpr, MAPPED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The ids of the CANDIDATES largest logits of a row, falling, the lowest among equals first, and their
    probabilities, in memory that the host can read; one program per row. NaN if a logit is.

    Reads slices · 132 bytes.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    row = tl.program_id(0)
    piece, slot = tl.arange(0, SLICES), tl.arange(0, SLICES * CANDIDATES)
    own = keys + row * slices * CANDIDATES
    best = tl.topk(tl.load(own + slot, mask=slot < slices * CANDIDATES, other=NO_KEY), CANDIDATES)
    first = tl.load(own + piece * CANDIDATES, mask=piece < slices, other=NO_KEY)
    mass = tl.load(masses + row * slices + piece, mask=piece < slices, other=0.0)
    power, peak = _power(words), logits_of(tl.max(best, axis=0))
    total = tl.sum(tl.where(mass == 0.0, 0.0, mass * tl.exp(power * (logits_of(first) - peak))), axis=0)
    prob = tl.where(best == NO_KEY, 0.0, tl.exp(power * (logits_of(best) - peak)) / total)
    at = row * CANDIDATES + tl.arange(0, CANDIDATES)
    tl.store(ids + at, token_ids(ids_of(best), table, vocabulary, MAPPED))
    tl.store(probs + at, prob)
