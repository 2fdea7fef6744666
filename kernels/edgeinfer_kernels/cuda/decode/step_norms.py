"""What the kernels of a step read, and which norm follows what they write."""

from dataclasses import dataclass

from torch import Tensor

from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.specification import NormSpecification


@dataclass
class Source:
    """What a projection reads: activations, and the squares of a norm that is still to be applied."""

    activations: Activations
    squares: Tensor
    norm: NormSpecification | None = None


@dataclass(frozen=True)
class NextNorm:
    """The norm of what a block leaves: its facts, weight and bias; None where there is none."""

    facts: NormSpecification
    weight: Tensor | None
    bias: Tensor | None

    @property
    def folds(self) -> bool:
        """Whether the consumer can apply it to its sums."""
        return self.weight is None or (self.facts.kind == "rms" and self.bias is None)
