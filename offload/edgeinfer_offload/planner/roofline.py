"""The roofline model: the speed that an operation can reach on a device, and whether compute or memory limits
it.

Source: Yuan et al., "LLM Inference Unveiled: Survey and Roofline Model Insights" (2024), sections 2.2 to 2.4;
the counts of operations and bytes are those used for its table of LLaMA-2-7B on an A6000.
"""

from dataclasses import dataclass
from typing import Literal

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Roofline:
    """A device: peak operations per second (a multiply-accumulate counts as two), bytes per second."""

    operations_per_second: float
    bytes_per_second: float

    @property
    def ridge_point(self) -> float:
        """Operations per byte above which compute is the limit."""
        return self.operations_per_second / self.bytes_per_second


@dataclass(frozen=True)
class Work:
    """The work of an operation: operations, and bytes read and written."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes

    def reachable(self, roofline: Roofline) -> float:
        """min(π, β · I), operations per second."""
        return min(roofline.operations_per_second, roofline.bytes_per_second * self.intensity)

    def bound(self, roofline: Roofline) -> Bound:
        return "memory" if self.intensity < roofline.ridge_point else "compute"

    def seconds(self, roofline: Roofline) -> float:
        """At least max(operations/π, bytes/β)."""
        return max(self.operations / roofline.operations_per_second, self.bytes / roofline.bytes_per_second)


def linear(rows: int, inputs: int, outputs: int, size: float = 2) -> Work:
    """A matmul of `rows` activations with a matrix; all elements have `size` bytes."""
    elements = inputs * outputs + rows * inputs + rows * outputs
    return Work(2 * rows * inputs * outputs, size * elements)


def attention_product(queries: int, keys: int, heads: int, head_dim: int, size: float = 2) -> Work:
    """Queries times keys, or scores times values: unfused, with separate keys per head."""
    elements = (queries + keys) * heads * head_dim + heads * queries * keys
    return Work(2 * heads * queries * keys * head_dim, size * elements)


def softmax(queries: int, keys: int, heads: int, size: float = 2) -> Work:
    """Five operations per score; each score is read and written."""
    return Work(5 * heads * queries * keys, 2 * size * heads * queries * keys)


def norm(rows: int, width: int, size: float = 2) -> Work:
    """Seven operations per element."""
    return Work(7 * rows * width, 2 * size * rows * width)


def add(rows: int, width: int, size: float = 2) -> Work:
    """A residual addition; the source counts one read and one write."""
    return Work(rows * width, 2 * size * rows * width)
