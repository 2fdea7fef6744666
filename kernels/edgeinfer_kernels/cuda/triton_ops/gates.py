"""The gates of attention heads."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def apply_gates_kernel(
    values, queries, scales, stride,
    HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """values (tokens, heads · HEAD_DIM) *= sigmoid(gate), in place; program (token, head).

    `queries`: rows of `stride` elements; the gate of each head follows its query. With SCALED they are still
    to be multiplied by `scales` (tokens,). Reads at most 8 bytes per element, writes 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dimension = tl.arange(0, DIMENSIONS)
    mask = dimension < HEAD_DIM
    gate = tl.load(queries + token * stride + (2 * head + 1) * HEAD_DIM + dimension, mask=mask, other=0.0)
    if SCALED:
        gate = gate * tl.load(scales + token)
    at = values + (token * tl.num_programs(1) + head) * HEAD_DIM + dimension
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32) * sigmoid(gate)
    tl.store(at, value.to(values.dtype.element_ty), mask=mask)
