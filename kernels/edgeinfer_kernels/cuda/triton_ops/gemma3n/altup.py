"""The kernels of AltUp: the streams of a token before the first layer, before and after each layer, and after
the last.

`streams` (count + 1, tokens, WIDTH) float32, `stride` elements apart: S_0, S_1…, and P_0. The predictions
P_1… replace S_1… and are replaced by the corrected streams. S_0 and P_0 don't share a row, because all
programs of a token read S_0 as a whole while they write P_0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.gemma3n.rows import sixteens, store_input
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


class StreamsConfig(NamedTuple):
    """AltUp's streams of `width` columns. padded, block: count and width, powers of two; piece: columns of a
    program.
    """

    count: int
    padded: int
    width: int
    block: int
    piece: int


class RouterArgs(NamedTuple):
    """AltUp's router: `gains` (streams, columns) and `coefs` (rows, streams) float32, and ε of its norm."""

    gains: Any
    coefs: Any
    epsilon: Any


@triton.jit
def _router_results(x, router, STREAMS: tl.constexpr):
    """(padded,): tanh(gains · norm(x)) of a row x, whose gains include the norm's weights and 1 / d."""
    WIDTH: tl.constexpr = STREAMS.width
    stream, offsets = tl.arange(0, STREAMS.padded), tl.arange(0, STREAMS.block)
    mask = offsets < WIDTH
    value = tl.load(x + offsets, mask=mask, other=0.0)
    inside = (stream < STREAMS.count)[:, None] & mask[None, :]
    gains = tl.load(router.gains + stream[:, None] * WIDTH + offsets[None, :], mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + router.epsilon)
    products = tl.sum(gains * value[None, :], axis=1) * inverse
    return 1.0 - 2.0 / (tl.exp(2.0 * products) + 1.0)


@triton.jit
def _coefs(results, router, row, STREAMS: tl.constexpr):
    """(padded,): the products of rows of the coefficients with the results of the router."""
    COUNT: tl.constexpr = STREAMS.count
    stream = tl.arange(0, STREAMS.padded)
    inside = (stream < COUNT)[:, None] & (stream < COUNT)[None, :]
    weights = tl.load(router.coefs + row[:, None] * COUNT + stream[None, :], mask=inside, other=0.0)
    return tl.sum(weights * results[None, :], axis=1)


@triton.jit
def altup_predict_kernel(
    streams, stride, x, router, following, STREAMS: tl.constexpr, GAIN: tl.constexpr, OUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """P_j = S_j + Σ_i C_ji · S_i and x = P_0, which is also stored as the next input unless OUT is None;
    program (piece, token).

    C: `coefs` (count², count) times the router's results. A token reads and writes count · WIDTH · 4 bytes;
    each of its programs reads S_0 and the gains.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    COUNT: tl.constexpr = STREAMS.count
    WIDTH: tl.constexpr = STREAMS.width
    token = tl.program_id(1).to(tl.int64)
    own = streams + token * WIDTH
    results = _router_results(own, router, STREAMS)
    column = tl.program_id(0) * STREAMS.piece + tl.arange(0, STREAMS.piece)
    stream, inside = tl.arange(0, STREAMS.padded), column < WIDTH
    mask = (stream < COUNT)[:, None] & inside[None, :]
    value = tl.load(own + stream[:, None] * stride + column[None, :], mask=mask, other=0.0)
    for index in tl.static_range(COUNT):
        coefs = _coefs(results, router, stream * COUNT + index, STREAMS)
        value += coefs[:, None] * tl.load(own + index * stride + column, mask=inside, other=0.0)[None, :]
    first = tl.sum(tl.where((stream == 0)[:, None], value, 0.0), axis=0)
    slot = tl.where(stream == 0, COUNT, stream)
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(own + slot[:, None] * stride + column[None, :], value, mask=mask)
    tl.store(x + token * WIDTH + column, first, mask=inside)
    if OUT is not None:
        store_input(first, following, token, WIDTH, GAIN, OUT)


@triton.jit
def altup_correct_kernel(
    streams, stride, x, router, correct_scale, out, STREAMS: tl.constexpr, OUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """S_j = P_j + c_j · (x - P_0), and out = s ⊙ S_0: activations, or floats (tokens, WIDTH) if OUT is None;
    program (piece, token).

    c: 1 + `coefs` (count, count) times the router's results. A token reads and writes count · WIDTH · 4
    bytes; each of its programs reads x and the gains.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    COUNT: tl.constexpr = STREAMS.count
    WIDTH: tl.constexpr = STREAMS.width
    token = tl.program_id(1).to(tl.int64)
    own, row = streams + token * WIDTH, x + token * WIDTH
    coefs = 1.0 + _coefs(_router_results(row, router, STREAMS), router, tl.arange(0, STREAMS.padded), STREAMS)
    column = tl.program_id(0) * STREAMS.piece + tl.arange(0, STREAMS.piece)
    stream, inside = tl.arange(0, STREAMS.padded), column < WIDTH
    mask = (stream < COUNT)[:, None] & inside[None, :]
    slot = tl.where(stream == 0, COUNT, stream)
    value = tl.load(own + slot[:, None] * stride + column[None, :], mask=mask, other=0.0)
    change = tl.load(row + column, mask=inside, other=0.0)
    change -= tl.load(own + COUNT * stride + column, mask=inside, other=0.0)
    value += coefs[:, None] * change[None, :]
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(own + stream[:, None] * stride + column[None, :], value, mask=mask)
    gate = tl.sum(tl.where((stream == 0)[:, None], value, 0.0), axis=0)
    gate *= tl.load(correct_scale + column, mask=inside, other=0.0)
    if OUT is None:
        tl.store(out + token * WIDTH + column, gate, mask=inside)
    else:
        values, group = sixteens(gate)
        quantize(values, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def altup_add_kernel(
    y, y_stride, row_scales, streams, stride, norm, STREAMS: tl.constexpr, SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """S_j += rms(y) for all but the first stream; program (piece, token).

    With SCALED y (tokens, y_stride) is still to be multiplied by `row_scales`. A token reads and writes
    (count - 1) · WIDTH · 4 bytes; each of its programs reads y.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    WIDTH: tl.constexpr = STREAMS.width
    token, offsets = tl.program_id(1).to(tl.int64), tl.arange(0, STREAMS.block)
    row = y + token * y_stride
    whole = tl.load(row + offsets, mask=offsets < WIDTH, other=0.0)
    column = tl.program_id(0) * STREAMS.piece + tl.arange(0, STREAMS.piece)
    stream, inside = tl.arange(0, STREAMS.padded), column < WIDTH
    value = tl.load(row + column, mask=inside, other=0.0)
    if SCALED:
        scale = tl.load(row_scales + token)
        whole, value = whole * scale, value * scale
    value *= tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + norm.epsilon)
    value *= tl.load(norm.weight + column, mask=inside, other=0.0)
    mask = ((stream > 0) & (stream < STREAMS.count))[:, None] & inside[None, :]
    at = streams + token * WIDTH + stream[:, None] * stride + column[None, :]
    total = tl.load(at, mask=mask, other=0.0) + value[None, :]
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(at, total, mask=mask)


@triton.jit
def _of_one_length(first, projected, STREAMS: tl.constexpr):
    """(padded, block): the row `first`, and the rows `projected` (count - 1, WIDTH) with its length."""
    stream, offsets = tl.arange(0, STREAMS.padded), tl.arange(0, STREAMS.block)
    mask = offsets < STREAMS.width
    is_first, is_stream = (stream == 0)[:, None], stream < STREAMS.count
    at = projected + (stream - 1)[:, None] * STREAMS.width + offsets[None, :]
    value = tl.load(at, mask=is_stream[:, None] & (stream > 0)[:, None] & mask[None, :], other=0.0)
    value = tl.where(is_first, tl.load(first + offsets, mask=mask, other=0.0)[None, :], value)
    squares = tl.sum(value * value, axis=1)
    wanted = tl.sum(tl.where(stream == 0, squares, 0.0), axis=0)
    return value * tl.sqrt(wanted / tl.where(is_stream, squares, 1.0))[:, None]


@triton.jit
def altup_expand_kernel(
    x, projected, projected_stride, streams, stride, STREAMS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """S_0 = x, and S_j = `projected` of a stream with the length of x; program (token,).

    `projected`: rows of count - 1 streams, projected_stride apart by token. Reads and writes
    count · WIDTH · 4 bytes per token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    value = _of_one_length(x + token * STREAMS.width, projected + token * projected_stride, STREAMS)
    stream, offsets = tl.arange(0, STREAMS.padded), tl.arange(0, STREAMS.block)
    mask = (stream < STREAMS.count)[:, None] & (offsets < STREAMS.width)[None, :]
    at = streams + token * STREAMS.width + stream[:, None] * stride + offsets[None, :]
    tl.store(at, value, mask=mask)


@triton.jit
def altup_merge_kernel(first, projected, projected_stride, x, STREAMS: tl.constexpr, DEPENDENT: tl.constexpr):
    """x = the mean of S_0, `first`, and `projected` of the other streams with its length; program (token,).

    `projected` as in `altup_expand_kernel`. Reads count · WIDTH · 4 bytes per token, writes WIDTH · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, STREAMS.block)
    value = _of_one_length(first + token * STREAMS.width, projected + token * projected_stride, STREAMS)
    mean = tl.sum(value, axis=0) / STREAMS.count
    tl.store(x + token * STREAMS.width + offsets, mean, mask=offsets < STREAMS.width)
