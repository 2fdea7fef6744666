"""The phases that the blocks of RWKV-7 share: rows of the state, and inputs between two tokens."""

from edgeinfer_kernels.cpu.native.blocks.phases import (
    normalize,
)
from edgeinfer_kernels.cpu.native.blocks.recurrent_rows import (
    row_address,
    row_lanes,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply_add,
    store_floats,
    subtract,
)


@device_function
def normalize_rows(pool, counter, thread, step_args, norm, state):
    """Phase: norm(x) of every token to its row of the state."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        normalize(norm, x, row_address(state, step_args, token))
        token = next_token(pool, counter, tokens, token)


@device_function
def mix_piece(state, step_args, lerp, target, token, first, last):
    """h + lerp · (h₋₁ - h) of columns first…last of a token, in the input formats of `target`."""
    row = row_address(state, step_args, token)
    before = row_address(state, step_args, token - 1)
    out = target.floats + token * target.float_stride
    for i in range(first, last, 16):
        h = load_floats(row + 4 * i)
        difference = subtract(row_lanes(before, 4 * i), h)
        store_floats(out + 4 * i, multiply_add(load_floats(lerp + 4 * i), difference, h))
    write_activations(out, target, token, step_args.tokens, first, last)
