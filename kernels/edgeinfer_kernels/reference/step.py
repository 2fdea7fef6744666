"""What the formula of a block reads besides the normed hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.decoder_state import Routing
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.recurrent_state import RecurrentStep

NO_STEP = RecurrentStep()
Array = npt.NDArray[np.floating]
Observer = Callable[[Matrix, int, Array], None]
"""Called with each matrix before it is multiplied, its expert (0 if there is one matrix), and its inputs
(tokens, columns)."""


@dataclass(frozen=True)
class BlockStep:
    """One block and one step: specification, weights, state, and the positions of the tokens.

    `x`, `layer_input`: the hidden states before the block and before the layer. `batch`: the positions of
    tokens of several sequences; None: they are at start…
    """

    index: BlockIndex
    spec: Any
    weights: Any
    state: Any
    start: int
    x: Array
    layer_input: Array
    dtype: npt.DTypeLike
    batch: BatchPositions | None = None
    routing: Routing | None = None
    recurrent: RecurrentStep = NO_STEP
    shared: dict[str, Array] = field(default_factory=dict)
    """Results for blocks of later layers."""
    observer: Observer | None = None
    expert: int = 0
    """The expert whose matrices are multiplied."""

    def times(self, x: Array, matrix: Matrix, bias: Vector | None = None) -> Array:
        """x times the transposed matrix, in `dtype`, plus the bias if there is one."""
        if self.observer is not None:
            self.observer(matrix, self.expert, x)
        y = np.asarray(x @ matrix.decoded().astype(self.dtype).T)
        return y if bias is None else np.asarray(y + bias)


def normalize(x: Array, norm: NormSpec, weight: Vector | None, bias: Vector | None = None) -> Array:
    """The norm over the last axis; without a weight, x is returned unchanged."""
    if weight is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    mean = np.add.reduce(x * x, axis=-1, keepdims=True) / x.shape[-1]  # as np.mean, in half the time
    y = x / np.sqrt(mean + norm.epsilon) * weight
    return np.asarray(y if bias is None else y + bias)


def soft_cap(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + eˣ)."""
    return np.asarray(np.logaddexp(0, x))
