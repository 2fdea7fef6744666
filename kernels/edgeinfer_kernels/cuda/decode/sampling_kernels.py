"""Kernels that pass a sampled token to the next step and to the host."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


@triton.jit
def _advance(state, sampled, next_id, RING: tl.constexpr):
    """Store the id (-1: none) at its token's slot in the ring, and set it as the next step's token."""
    cached = tl.load(state + 24)
    tl.store(sampled + cached % RING, next_id)
    tl.store(state, tl.maximum(next_id, 0))
    tl.store(state + 8, cached + 1)
    tl.store(state + 24, cached + 1)


@triton.jit
def sample_best_kernel(
    best,
    best_ids,
    state,
    sampled,
    PROGRAMS: tl.constexpr,
    RING: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The id of the largest logit, the lowest id among equals, for a step of one token; -1 if a logit is NaN.

    It is written to `sampled` (RING,) at the slot of the token's position, and to `state` as the next step's
    token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    PADDED: tl.constexpr = triton.next_power_of_2(PROGRAMS)
    index = tl.arange(0, PADDED)
    value = tl.load(best + index, mask=index < PROGRAMS, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    top, top_index = tl.max(value, axis=0, return_indices=True)
    next_id = tl.where((broken > 0) | (top == float("-inf")), -1, tl.load(best_ids + top_index))
    _advance(state, sampled, next_id, RING)


@triton.jit
def advance_kernel(results, state, sampled, RING: tl.constexpr):
    """Pass on the sampled token: `results` holds the id, or -1 if the host must sample."""
    _advance(state, sampled, tl.load(results), RING)
