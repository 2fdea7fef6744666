"""The kernel that gives a draft head the tokens after a step of its target, before the host knows them."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.step_words import CACHED_AT, POSITIONS_AT, SEQUENCES_AT, step_start


@triton.jit(do_not_specialize=["drafted", "before"])
def next_tokens_kernel(words, verified, following, drafted, before):
    """Move the head's step of `words` by the draft tokens that are right: after its `before` tokens those are
    put that the target continues with, and as many of the first ones leave it.

    `verified`: the words of the target's step, with `drafted` tokens after the first. `following`
    (tokens, 2): the token after each of that step.
    """
    index = tl.arange(0, POSITIONS_AT)
    next_ids = tl.load(following + 2 * index, mask=index <= drafted, other=-1)
    draft = tl.load(verified + 1 + index, mask=index < drafted, other=-1)
    is_right = (index < drafted) & (next_ids == draft)
    right = tl.min(tl.where(is_right, POSITIONS_AT, index), axis=0)
    source, start = index + right, step_start(words) + right
    is_before = source < before
    tokens = tl.load(words + source, mask=is_before, other=0)
    added = tl.load(following + 2 * (source - before), mask=(index <= before) & (source >= before), other=0)
    tl.debug_barrier()  # All threads have read the words.
    used = index <= before
    tl.store(words + index, tl.where(is_before, tokens, tl.maximum(added, 0)), mask=used)
    tl.store(words + POSITIONS_AT + index, start + index, mask=used)
    tl.store(words + CACHED_AT, start)
    tl.store(words + SEQUENCES_AT, start)
