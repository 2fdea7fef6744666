"""What a model with fewer than four bits per weight loses."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

MIN_BITS = 4.0
TRAINED = frozenset(("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"))
"""Types of models that were trained with weights of few values: they lose nothing by them."""
MEASURED = ((4.9, "Q4_K_M", 0.031, 92), (4.0, "Q3_K_M", 0.102, None), (3.2, "Q2_K", 0.445, 71))
"""Bits per weight, the type, the KL divergence from 16 bits in nats, and the percentage of positions with the
same most probable token: Llama 3 8B on wikitext, by the README of llama.cpp's perplexity tool.
"""


class SizedTensor(Protocol):
    """The fields of a tensor that are read: see `edgeinfer_quant_formats.TensorInfo`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...


def low_bits_note(tensors: Iterable[SizedTensor]) -> str | None:
    """A line on what a model of these tensors loses; None: little, or it was trained like this."""
    weights, sizes = 0, Counter[str]()
    for tensor in tensors:
        weights += math.prod(tensor.shape)
        sizes[tensor.format.name] += tensor.nbytes
    if not weights or sizes.most_common(1)[0][0] in TRAINED:
        return None
    bits = 8 * sizes.total() / weights
    if bits >= MIN_BITS:
        return None
    return (
        f"{bits:.1f} bits per weight: below {MIN_BITS:.0f} a model loses much, and a smaller one with four "
        f"is often better. Llama 3 8B, KL divergence from 16 bits: {', '.join(map(_measured, MEASURED))}"
    )


def _measured(row: tuple[float, str, float, int | None]) -> str:
    bits, name, divergence, same = row
    positions = "" if same is None else f", the same most probable token at {same} % of positions"
    return f"{divergence:.2f} with {name} ({bits} bits{positions})"
