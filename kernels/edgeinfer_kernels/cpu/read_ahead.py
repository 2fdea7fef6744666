"""What threads read into their caches while they wait for a device: the first weights of the next step.

A device computes attention for tens of microseconds, in which the CPU's memory would be idle. Of a sparse
layer these are the predictor, and gate, up and down of its first neurons: the hottest of the part, if the
file has hot neurons first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.attention import AttentionWeights
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, NEURONS_PER_BLOCK
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.neuron_predictor import NeuronPredictor

SHARE_BYTES = 256 << 10
"""Read by a thread in one wait, at most: a part of its L2 cache."""
PIECE_BYTES = 16 << 10
"""Read of one span before the next one's turn."""


class Span(NamedTuple):
    """Memory that is divided between the threads, each a part of it."""

    address: int
    nbytes: int

    def first(self, part: int, parts: int) -> "Span":
        """The first `part` of `parts` equal parts."""
        return Span(self.address, self.nbytes * part // parts)


FindMemory = Callable[[Matrix], Span | None]
"""Where the weights of a matrix are; None: they stay in the file."""


def dense_spans(weights: Any, find: FindMemory) -> list[Span]:
    """The memory that a dense block reads first; of other blocks than attention and feed-forward, none."""
    match weights:
        case AttentionWeights():
            return _found(weights.inputs(), find)
        case FeedForwardWeights():
            return _found([weights.ffn_gate, weights.ffn_up], find)
        case _:
            return []


def sparse_spans(
    weights: FeedForwardWeights, predictor: NeuronPredictor | None, threads: int, find: FindMemory
) -> list[Span]:
    """The memory that a sparse feed-forward reads first, or most probably."""
    if predictor is None:
        return _found([weights.ffn_gate or weights.ffn_up], find)
    neurons = weights.ffn_up.rows
    gate, up, down = (
        found[0] if (found := _found([matrix], find)) else Span(0, 0)
        for matrix in (weights.ffn_gate, weights.ffn_up, weights.ffn_down)
    )
    each = max(1, (gate.nbytes + up.nbytes + down.nbytes) // neurons)
    whole = NEURONS_PER_BLOCK * threads
    hottest = min(neurons, -(-SHARE_BYTES * threads // each // whole) * whole)
    neuron_spans = [span.first(hottest, neurons) for span in (gate, up, down) if span.nbytes]
    return [*_found([predictor.first, predictor.second], find), *neuron_spans]


def _found(matrices: Iterable[Matrix | None], find: FindMemory) -> list[Span]:
    return [span for matrix in matrices if matrix is not None and (span := find(matrix))]


def ranges(spans: Sequence[Span], threads: int) -> npt.NDArray[np.int64]:
    """For `ServedStep.ahead`, (ranges, 3): the spans in turns, SHARE_BYTES for each thread in all."""
    shares = [-(-span.nbytes // threads // CACHE_LINE) * CACHE_LINE for span in spans]
    found, left, at = list[tuple[int, int, int]](), SHARE_BYTES, 0
    while left > 0 and at < max(shares, default=0):
        for span, share in zip(spans, shares, strict=True):
            size = min(PIECE_BYTES, share - at, left)
            if size > 0:
                found.append((span.address + at, share, size))
                left -= size
        at += PIECE_BYTES
    return np.array(found, np.int64).reshape(-1, 3)
