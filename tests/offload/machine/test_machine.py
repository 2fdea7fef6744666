"""A machine goes through JSON unchanged; what isn't one is refused."""

from dataclasses import replace

import pytest

from tests.offload.model_shapes import laptop


def test_a_format_that_was_not_measured_is_read_at_a_share_of_the_bandwidth() -> None:
    processor = replace(laptop().processor, kernels={"Q4_K": 2e10})
    assert processor.rate("Q4_K") == 2e10
    assert processor.rate("Q8_0") == pytest.approx(0.9 * 50e9)
