"""The roofline reproduces the published table of LLaMA-2-7B on an A6000: 2048 tokens, float16, batch 1."""

import pytest

from edgeinfer_offload.planner.roofline import Roofline, Work, add, attention_product, linear, norm, softmax

A6000 = Roofline(155e12, 768e9)
WIDTH, HIDDEN, HEADS, HEAD, TOKENS = 4096, 11008, 32, 128, 2048

# work -> operations, bytes, operations a byte, reachable operations a second, bound; rounded, as printed (the
# norms' 1.344 T as 1T)
TABLE: list[tuple[str, Work, float, float, float, float, str]] = [
    ("prefill q, k, v, o", linear(TOKENS, WIDTH, WIDTH), 69e9, 67e6, 1024, 155e12, "compute"),
    ("prefill gate, up, down", linear(TOKENS, WIDTH, HIDDEN), 185e9, 152e6, 1215, 155e12, "compute"),
    ("prefill qk, sv", attention_product(TOKENS, TOKENS, HEADS, HEAD), 34e9, 302e6, 114, 87e12, "memory"),
    ("prefill softmax", softmax(TOKENS, TOKENS, HEADS), 671e6, 537e6, 1.25, 960e9, "memory"),
    ("prefill norm", norm(TOKENS, WIDTH), 59e6, 34e6, 1.75, 1.344e12, "memory"),
    ("prefill add", add(TOKENS, WIDTH), 8e6, 34e6, 0.25, 192e9, "memory"),
    ("decode q, k, v, o", linear(1, WIDTH, WIDTH), 34e6, 34e6, 1, 768e9, "memory"),
    ("decode gate, up, down", linear(1, WIDTH, HIDDEN), 90e6, 90e6, 1, 768e9, "memory"),
    ("decode qk, sv", attention_product(1, TOKENS, HEADS, HEAD), 17e6, 17e6, 0.99, 762e9, "memory"),
    ("decode softmax", softmax(1, TOKENS, HEADS), 328e3, 262e3, 1.25, 960e9, "memory"),
    ("decode norm", norm(1, WIDTH), 29e3, 16e3, 1.75, 1.344e12, "memory"),
    ("decode add", add(1, WIDTH), 4e3, 16e3, 0.25, 192e9, "memory"),
]


@pytest.mark.parametrize(("work", "row"), [(row[1], row[2:]) for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table_is_reproduced(work: Work, row: tuple[float, float, float, float, str]) -> None:
    operations, nbytes, intensity, reachable, bound = row
    two_digits = 0.05
    assert work.operations == pytest.approx(operations, rel=two_digits)
    assert work.bytes == pytest.approx(nbytes, rel=two_digits)
    assert work.intensity == pytest.approx(intensity, rel=0.01)
    assert work.reachable(A6000) == pytest.approx(reachable, rel=0.01)
    assert work.bound(A6000) == bound


def test_the_ridge_point_separates_memory_bound_from_compute_bound() -> None:
    assert A6000.ridge_point == pytest.approx(202, abs=0.5)
    assert Work(A6000.ridge_point * 0.99, 1).bound(A6000) == "memory"
    assert Work(A6000.ridge_point * 1.01, 1).bound(A6000) == "compute"


def test_a_decoded_token_of_the_table_takes_eighteen_milliseconds() -> None:
    """Weights and cache of all layers, the head left out: about 55 tokens/s at most."""
    layer = [linear(1, WIDTH, WIDTH)] * 4 + [linear(1, WIDTH, HIDDEN)] * 3
    layer += [attention_product(1, TOKENS, HEADS, HEAD)] * 2
    assert 32 * sum(work.seconds(A6000) for work in layer) == pytest.approx(18.3e-3, rel=0.01)
