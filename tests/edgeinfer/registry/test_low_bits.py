"""The line on what a model with few bits per weight loses."""

import pytest

from edgeinfer.registry.low_bits import low_bits_note
from edgeinfer_quant_formats.formats import FORMATS
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo

SHAPE = (16, 1024)


def tensors(*names: str) -> list[TensorInfo]:
    """A matrix of each of these types, all of one size."""
    return [TensorInfo(name, SHAPE, FORMATS[name], 0, FORMATS[name].nbytes(SHAPE), 0) for name in names]


@pytest.mark.parametrize(
    ("names", "begin"),
    [(["Q2_K", "Q2_K"], "2.6 bits per weight"), (["IQ1_S", "Q4_0"], "3.0 bits"), (["IQ1_S", "Q6_K"], None)],
)
def test_fewer_than_four_bits_lose_much(names: list[str], begin: str | None) -> None:
    line = low_bits_note(tensors(*names))
    assert line is None if begin is None else line is not None and line.startswith(begin)


@pytest.mark.parametrize("name", ["TQ2_0", "Q1_0", "Q2_0"])
def test_weights_that_were_trained_with_few_values_lose_nothing(name: str) -> None:
    assert low_bits_note(tensors(name)) is None
