"""Kernels of a decode step at the CPU stages: hidden states are sent to the exchange buffer, and the CPU's
results are received.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cpu.runtime.abi import ELSEWHERE
from edgeinfer_kernels.cuda.compile_target import INTERPRETED, USES_PTX
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import load_norm, normalized, whole_row
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers
from edgeinfer_kernels.cuda.triton_ops.waiting import await_number

_ELSEWHERE = tl.constexpr(ELSEWHERE)


@triton.jit
def _raise_number(number_address, number):
    """Store the flag with release semantics: the host sees it only after all earlier writes of this
    program.
    """
    tl.debug_barrier()
    if INTERPRETED:
        tl.store(number_address, number)
    elif not USES_PTX:
        tl.atomic_xchg(number_address, number, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "st.release.sys.global.u64 [$1], $2; mov.u64 $0, $2;",
            "=l,l,l",
            [number_address, number],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["stage"])
def send_kernel(
    x,
    rows,
    sent,
    stage,
    ids,
    weights,
    slots,
    sent_ids,
    sent_weights,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    COUNT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write TOKENS rows of x to the exchange buffer, then `stage` to `sent`; one program.

    With USED experts per token their `ids` are converted to slots: `slots` (2, COUNT) has the slot of each
    of the COUNT experts on the device and on the host, -1: absent. The host's slots are sent with the
    weights; for other experts, ELSEWHERE minus their number. Writes 4·WIDTH + 12·USED bytes per token to host
    memory.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = column < WIDTH
    for token in tl.static_range(TOKENS):
        value = tl.load(x + token * WIDTH + column, mask=inside, other=0.0)
        tl.store(rows + token * STRIDE + column, value, mask=inside)
    if EXPERTS_PER_TOKEN > 0:
        assignment = tl.arange(0, triton.next_power_of_2(TOKENS * EXPERTS_PER_TOKEN))
        selected = assignment < TOKENS * EXPERTS_PER_TOKEN
        expert = tl.load(ids + assignment, mask=selected, other=0)
        there = tl.load(slots + expert, mask=selected, other=-1)
        here = tl.load(slots + COUNT + expert, mask=selected, other=-1)
        weight = tl.load(weights + assignment, mask=selected, other=0.0)
        here = tl.where(here < 0, _ELSEWHERE - expert, here)
        tl.store(sent_ids + assignment, here.to(tl.int64), mask=selected)
        tl.store(sent_weights + assignment, weight, mask=selected)
        tl.debug_barrier()
        tl.store(ids + assignment, there, mask=selected)
    _raise_number(sent, stage.to(tl.int64))


@triton.jit(do_not_specialize=["stage"])
def receive_sum_kernel(
    answered,
    host_lost,
    stage,
    lost,
    rows,
    y,
    y_stride,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y += the exchange buffer's rows after the host has `answered` this stage; one program per token. Reads
    4·WIDTH bytes of host memory; reads and writes as many of y.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    await_number(answered, stage.to(tl.int64), lost, host_lost)
    token = tl.program_id(0)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = column < WIDTH
    at = y + token * y_stride + column
    value = tl.load(at, mask=inside, other=0.0)
    tl.store(at, value + tl.load(rows + token * STRIDE + column, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["stage"])
def receive_kernel(
    answered,
    host_lost,
    stage,
    lost,
    rows,
    y,
    y_stride,
    scale,
    x,
    post_norm,
    norm,
    out,
    STRIDE: tl.constexpr,
    NORM: tl.constexpr,
    OUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """x = the exchange buffer's rows after the host has `answered` this stage, + scale·y if NORM.adds;
    then norm(x) as activations; one program per token. With a post-norm the rows are the host's part of a
    sum: x += scale·post_norm(rows + y).

    Reads 4·width bytes of host memory and of y, with a post-norm also of x. Writes x, and 12 words (44 with
    floats) per 32 columns.
    """
    WIDTH: tl.constexpr = NORM.width
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group, column, inside = whole_row(NORM)
    if NORM.has_post_norm:
        post_norm_loaded = load_norm(post_norm, inside, column, False)
    if NORM.has_norm:
        norm_loaded = load_norm(norm, inside, column, NORM.has_bias)
    wait_for_producers(DEPENDENT)
    await_number(answered, stage.to(tl.int64), lost, host_lost)
    value = tl.load(rows + token * STRIDE + column, mask=inside, other=0.0)
    pointers = x + token * WIDTH + column
    if NORM.has_post_norm:
        if NORM.adds:
            value += tl.load(y + token * y_stride + column, mask=inside, other=0.0)
        value = scale * normalized(value, post_norm_loaded, inside, NORM, False)
        value += tl.load(pointers, mask=inside, other=0.0)
        tl.debug_barrier()  # As in `residual_kernel`.
    elif NORM.adds:
        value += scale * tl.load(y + token * y_stride + column, mask=inside, other=0.0)
    tl.store(pointers, value, mask=inside)
    if NORM.has_norm:
        value = normalized(value, norm_loaded, inside, NORM, NORM.has_bias)
    quantize(value, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)
