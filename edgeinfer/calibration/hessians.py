"""Collects Σ x·xᵀ of the inputs of the matrices of a block, while the reference runs over a text."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.reference.step import Array

Hessian = npt.NDArray[np.float32]
COLLECTED_SHARE = 2
"""Inputs are kept as they are until there are this many times as many as columns."""


@dataclass
class Inputs:
    """The inputs of one or more matrices; kept as rows while that takes less memory than the sum."""

    columns: int
    rows: list[Array] = field(default_factory=list)
    total: Hessian | None = None
    last: Array | None = None
    """The inputs that were added last: of several matrices they are added once."""

    @property
    def is_empty(self) -> bool:
        return self.total is None and not self.rows

    def add(self, inputs: Array) -> None:
        if inputs is self.last:
            return
        self.last = inputs
        self.rows.append(inputs.astype(np.float32))
        if sum(map(len, self.rows)) >= COLLECTED_SHARE * self.columns:
            self.total, self.rows = self.hessian(), []

    def hessian(self) -> Hessian:
        """(columns, columns); the sum itself if there is one, to which the rows are then added."""
        total = np.zeros((self.columns, self.columns), np.float32) if self.total is None else self.total
        for rows in self.rows:
            total += rows.T @ rows
        if self.total is not None:
            self.rows = []
        return total


class InputCollector:
    """The inputs of the matrices `names` by (name, expert); `seen` is an observer of a `ReferenceBackend`.

    Matrices with the same inputs, such as gate and up, share them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._addresses: dict[tuple[str, int], int] = {}
        self.inputs: dict[tuple[str, int], Inputs] = {}

    def seen(self, matrix: Matrix, expert: int, inputs: Array) -> None:
        key = (matrix.name, expert)
        if matrix.name not in self._names:
            return
        # Parts of one tensor, such as q, k and v, have the same inputs; the first one counts.
        address = matrix.raw.ctypes.data
        if self._addresses.setdefault(key, address) != address:
            return
        if key not in self.inputs:
            shared = (each for each in self.inputs.values() if each.last is inputs)
            self.inputs[key] = next(shared, None) or Inputs(matrix.columns)
        self.inputs[key].add(inputs)
