"""The kernels of a feed-forward of which few neurons are active: the threshold of a token's gates, and the
hidden rows.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import store_scaled_pieces
from edgeinfer_kernels.cuda.triton_ops.activations import activate
from edgeinfer_kernels.cuda.triton_ops.gemma3n.rows import sixteens
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def _threshold(gate, scale, deviations, NEURONS: tl.constexpr, BLOCK: tl.constexpr):
    """mean + deviations · deviation of a row of gates times `scale`, the standard deviation with n - 1."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < NEURONS
    value = tl.load(gate + offsets, mask=mask, other=0.0) * scale
    mean = tl.sum(value, axis=0) / NEURONS
    distance = tl.where(mask, value - mean, 0.0)
    return mean + deviations * tl.sqrt(tl.sum(distance * distance, axis=0) / (NEURONS - 1))


@triton.jit
def _active(gate, up, threshold, ACTIVATION: tl.constexpr):
    """activation(max(0, gate - threshold)) · up."""
    return activate(tl.maximum(gate - threshold, 0.0), ACTIVATION) * up


@triton.jit
def gaussian_hidden_kernel(
    gate, up, stride, deviations, out,
    NEURONS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, ACTIVATION: tl.constexpr,
    OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = activation(max(0, gate - threshold)) · up as activations; program (piece, token).

    gate, up: rows of NEURONS elements, `stride` apart by token. A token reads NEURONS · 8 bytes and writes 12
    words (44 with floats) per 32 neurons; each of its programs reads all gates.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    gates, ups = gate + token * stride, up + token * stride
    threshold = _threshold(gates, 1.0, deviations, NEURONS, BLOCK)
    neuron = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = neuron < NEURONS
    own = tl.load(gates + neuron, mask=inside, other=0.0)
    hidden = _active(own, tl.load(ups + neuron, mask=inside, other=0.0), threshold, ACTIVATION)
    values, group = sixteens(hidden)
    quantize(values, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def _hidden_piece(offsets, mask, gate, up, scale, threshold, ACTIVATION: tl.constexpr):
    own = tl.load(gate + offsets, mask=mask, other=0.0) * scale
    return _active(own, tl.load(up + offsets, mask=mask, other=0.0) * scale, threshold, ACTIVATION)


@triton.jit
def gaussian_rows_kernel(
    gate_rows, up_rows, in_scales, deviations, out, row_scales,
    NEURONS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out = activation(max(0, gate - threshold)) · up / row scale; program (token,).

    out (tokens, NEURONS) is float16; gate and up (tokens, NEURONS) are still to be multiplied by `in_scales`.
    Reads NEURONS · 12 bytes per token, writes NEURONS · 2.
    """
    token = tl.program_id(0).to(tl.int64)
    gate, up, scale = gate_rows + token * NEURONS, up_rows + token * NEURONS, tl.load(in_scales + token)
    threshold = _threshold(gate, scale, deviations, NEURONS, BLOCK)
    store_scaled_pieces(
        out, row_scales, token, _hidden_piece, (gate, up, scale, threshold, ACTIVATION), NEURONS, PIECE
    )
