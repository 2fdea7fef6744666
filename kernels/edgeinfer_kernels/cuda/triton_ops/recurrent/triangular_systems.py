"""Unit lower triangular systems: within a chunk of a prompt they replace the delta rule."""

import triton
import triton.language as tl


@triton.jit
def substitute(lower, right, COUNT: tl.constexpr):
    """The solution u (COUNT, n) of (1 + lower) u = right; `lower` is strictly lower triangular."""
    index = tl.arange(0, COUNT)
    solution = right
    for row in tl.static_range(1, COUNT):
        factors = tl.sum(tl.where(index[:, None] == row, lower, 0.0), axis=0)
        known = tl.sum(factors[:, None] * solution, axis=0)
        solution = tl.where(index[:, None] == row, solution - known[None, :], solution)
    return solution


@triton.jit
def store_solution(part, lower, beta, COUNT: tl.constexpr):
    """The inverse of 1 + β · `lower` below the diagonal, times β, to (COUNT, COUNT)."""
    index = tl.arange(0, COUNT)
    is_below = index[:, None] > index[None, :]
    one = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    inverse = substitute(tl.where(is_below, beta[:, None] * lower, 0.0), one, COUNT)
    tl.store(part + index[:, None] * COUNT + index[None, :], inverse * beta[None, :])
