"""The inputs of a step's kernels, and the norm that follows their output."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.triton_ops.kernel_args import SumSquares
from edgeinfer_kernels.cuda.weights.device_block import DeviceNorms
from edgeinfer_kernels.decoder import ResidualBlock

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder


@dataclass
class Source:
    """The input of a projection: activations, and the sums of squares of a norm that is not yet applied."""

    activations: Activations
    sum_squares: Tensor
    norm: NormSpec | None = None

    def after(self, tokens: int) -> "Source":
        """That of the tokens after the first ones."""
        return Source(self.activations.after(tokens), self.sum_squares[tokens:], self.norm)

    @property
    def squares_args(self) -> SumSquares:
        """What the consumer needs to apply the norm."""
        return SumSquares(self.sum_squares, self.norm.epsilon if self.norm else 0.0)


@dataclass(frozen=True)
class NextNorm:
    """The norm after a block: specification, weight and bias; None if there is none."""

    spec: NormSpec
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of_result(cls, residual: ResidualBlock[Any], norms: DeviceNorms) -> "NextNorm":
        """The norm of a block's result, before it is added to x."""
        return cls(residual.post_norm_spec, norms.post_norm, None)

    @classmethod
    def take_sub_norm(
        cls, builder: "DeviceBuilder", spec: NormSpec, sub_norm: SubNorm | None
    ) -> "NextNorm | None":
        """The norm before the last projection of a block; allocates its weights."""
        if sub_norm is None:
            return None
        return cls(sub_norm.spec(spec), builder.vector(sub_norm.weight), None)

    @property
    def folds(self) -> bool:
        """Whether the consumer can apply it to its sums."""
        return self.weight is None or (self.spec.kind == "rms" and self.bias is None)
