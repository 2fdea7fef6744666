"""What threads read into their caches while they wait for a device."""

from dataclasses import replace

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.read_ahead import (
    PIECE_BYTES,
    SHARE_BYTES,
    Span,
    dense_spans,
    ranges,
    sparse_spans,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from tests.kernels.row_matrices import random_matrix

NEURONS, WIDTH, RANK, THREADS = 4096, 256, 32, 4


def named(name: str, kind: str, rows: int, columns: int) -> Matrix:
    return replace(random_matrix(kind, rows, columns), name=name)


def feed_forward() -> FeedForwardWeights:
    gate, up = (named(name, "Q4_0", NEURONS, WIDTH) for name in ("gate", "up"))
    return FeedForwardWeights(up, named("down", "Q4_0", WIDTH, NEURONS), gate)


def predictor() -> NeuronPredictor:
    first, second = named("first", "Q8_0", RANK, WIDTH), named("second", "Q8_0", NEURONS, RANK)
    return NeuronPredictor(first, second, np.zeros(NEURONS, np.float32))


def find(matrix: Matrix) -> Span:
    """Memory at an address that tells the matrix."""
    return Span({"first": 1, "second": 2, "gate": 3, "up": 4, "down": 5}[matrix.name] << 40, matrix.nbytes)


def test_a_dense_feed_forward_reads_gate_and_up() -> None:
    weights = feed_forward()
    assert dense_spans(weights, find) == [
        Span(3 << 40, weights.ffn_up.nbytes),
        Span(4 << 40, weights.ffn_up.nbytes),
    ]


def test_a_matrix_that_is_not_in_memory_is_left_out() -> None:
    assert dense_spans(feed_forward(), lambda matrix: None) == []


def test_a_block_of_another_kind_reads_nothing() -> None:
    assert dense_spans(NormSpec("rms", 1e-6), find) == []


def test_an_exact_layer_reads_its_gate() -> None:
    weights = feed_forward()
    assert sparse_spans(weights, None, THREADS, find) == [Span(3 << 40, weights.ffn_up.nbytes)]


def test_a_predicted_layer_reads_its_predictor_and_the_first_neurons() -> None:
    weights, own = feed_forward(), predictor()
    first, second, *neurons = sparse_spans(weights, own, THREADS, find)
    assert (first.nbytes, second.nbytes) == (own.first.nbytes, own.second.nbytes)
    assert [span.address >> 40 for span in neurons] == [3, 4, 5]
    total = sum(span.nbytes for span in neurons)
    each = total // 3
    assert all(span.nbytes == each for span in neurons)
    assert THREADS * SHARE_BYTES <= total <= 2 * THREADS * SHARE_BYTES
    assert each * NEURONS % weights.ffn_up.nbytes == 0


def test_ranges_alternate_between_the_spans() -> None:
    long, short = Span(1 << 40, 100 * PIECE_BYTES), Span(2 << 40, 4 * PIECE_BYTES)
    found = ranges([long, short], 4)
    assert found[:4].tolist() == [
        [1 << 40, 25 * PIECE_BYTES, PIECE_BYTES],
        [2 << 40, PIECE_BYTES, PIECE_BYTES],
        [(1 << 40) + PIECE_BYTES, 25 * PIECE_BYTES, PIECE_BYTES],
        [(1 << 40) + 2 * PIECE_BYTES, 25 * PIECE_BYTES, PIECE_BYTES],
    ]
    assert found[:, 2].sum() == SHARE_BYTES


def test_no_range_of_a_thread_reaches_into_the_next_ones() -> None:
    for threads in (1, 3, 16):
        span = Span(1 << 40, 37 * PIECE_BYTES + 64)
        found = ranges([span], threads)
        covered = found[:, 0] - span.address + found[:, 2]
        assert (covered <= found[:, 1]).all()
        assert found[:, 2].sum() == min(SHARE_BYTES, found[0, 1])


def test_without_spans_there_are_no_ranges() -> None:
    assert ranges([], 4).shape == ranges([Span(1, 0)], 4).shape == (0, 3)
