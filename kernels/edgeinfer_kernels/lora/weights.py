"""LoRA adapters of matrices, as the backends take them.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class LoraError(ValueError):
    """A backend can't use an adapter; the message names the tensor."""


@dataclass(frozen=True)
class LoraWeights:
    """What an adapter adds to a matrix: W becomes W + b·a.

    a: (experts, rank, columns), b: (experts, rows, rank), float32, of which b includes all factors.
    """

    name: str
    """Of the tensor."""
    a: Floats
    b: Floats

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def joined(adapters: Sequence[LoraWeights]) -> LoraWeights:
    """One adapter that adds what all of them add."""
    if len(adapters) == 1:
        return adapters[0]
    return LoraWeights(
        adapters[0].name,
        np.concatenate([each.a for each in adapters], axis=1),
        np.concatenate([each.b for each in adapters], axis=2),
    )


@dataclass(frozen=True)
class ModelLora:
    """The adapters of a decoder: of matrices by the id of their `Matrix`, and of the embedding, whose rows
    are the vocabulary.
    """

    matrices: Mapping[int, LoraWeights] = field(default_factory=dict)
    embedding: LoraWeights | None = None
