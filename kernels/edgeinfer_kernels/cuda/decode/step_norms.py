"""The inputs of a step's kernels, the norm that follows their output, and the launches of norms."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig, SumSquares
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import activation_norm_kernel, add_norm_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceNorms
from edgeinfer_kernels.decoder import ResidualBlock

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
    from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
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


class NormLaunches:
    """Launches the kernels of a step that normalize or quantize whole rows."""

    def __init__(self, launches: "StepLaunches") -> None:
        self._launches = launches

    def activation_norm(
        self,
        activation: Activation,
        ffn: "DeviceFeedForward",
        norm: NextNorm,
        rows: Tensor,
        out: Activations,
        tokens: int,
    ) -> None:
        """The normalized hidden rows as activations, from the products of up and gate, side by side."""
        self._launches.launch(
            activation_norm_kernel,
            (tokens,),
            rows,
            rows.stride(0),
            ffn.up.shapes.padded_rows,
            self._launches.or_nothing(ffn.gate_bias),
            self._launches.or_nothing(ffn.up_bias),
            ffn.gate_scale,
            ffn.up_scale,
            self.args(norm),
            out.words,
            NORM=self.rows_config(ffn.neurons, norm),
            ACTIVATION=activation_code(activation),
            HAS_GATE=ffn.gate is not None,
            HAS_BIAS=ffn.up_bias is not None,
            OUT=out.config,
            warps=8,
        )

    def add_norm(
        self,
        y: Tensor | None,
        post_norm: NextNorm | None,
        scale: float,
        norm: NextNorm,
        out: Activations,
        tokens: int,
        gain: float = 1.0,
    ) -> None:
        """x = gain·(x + scale·post_norm(y)), or gain·x without y; then its norm into `out`."""
        read = self._launches.workspace.x if y is None else y
        has_post_norm = post_norm is not None and post_norm.weight is not None
        self._launches.launch(
            add_norm_kernel,
            (tokens,),
            read,
            read.shape[1],
            self._launches.workspace.x,
            scale,
            gain,
            self.args(post_norm),
            self.args(norm),
            out.words,
            NORM=self.config(norm, adds=y is not None, has_post_norm=has_post_norm, scales=gain != 1),
            OUT=out.config,
            warps=8,
        )

    def args(self, norm: NextNorm | None) -> NormArgs:
        """The weights of a norm, if there is one."""
        or_nothing = self._launches.or_nothing
        if norm is None:
            return NormArgs(or_nothing(None), or_nothing(None), 0.0)
        return NormArgs(or_nothing(norm.weight), or_nothing(norm.bias), norm.spec.epsilon)

    def config(
        self, norm: NextNorm, *, adds: bool, has_post_norm: bool = False, scales: bool = False
    ) -> NormConfig:
        """The configuration of a kernel that normalizes whole rows of x."""
        width = self._launches.model.spec.hidden_size
        kinds = norm.weight is not None, norm.spec.kind == "layer", norm.bias is not None
        groups = next_power_of_two(-(-width // 16))
        return NormConfig(width, groups, adds, has_post_norm, *kinds, scales=scales)

    @staticmethod
    def rows_config(width: int, norm: NextNorm) -> NormConfig:
        """As `config`, for rows of `width` columns and a norm without a bias."""
        groups, is_layer_norm = next_power_of_two(-(-width // 16)), norm.spec.kind == "layer"
        return NormConfig(width, groups, False, False, True, is_layer_norm, False)

    def quantize(
        self, values: Tensor, width: int, out: Activations, tokens: int, stride: int | None = None
    ) -> None:
        """Quantize rows of `width` floats, `stride` apart, to activations."""
        no_norm, groups = self.args(None), next_power_of_two(-(-width // 16))
        self._launches.launch(
            add_norm_kernel,
            (tokens,),
            values,
            width if stride is None else stride,
            self._launches.workspace.nothing,
            0.0,
            1.0,
            no_norm,
            no_norm,
            out.words,
            NORM=NormConfig(width, groups, False, False, False, False, False),
            OUT=out.config,
            warps=4,
        )

    def normalize(self, rows: Tensor, width: int, norm: NextNorm, out: Activations, tokens: int) -> None:
        """The norm of the first `width` elements of rows, as activations."""
        self._launches.launch(
            add_norm_kernel,
            (tokens,),
            rows,
            rows.stride(0),
            self._launches.workspace.nothing,
            0.0,
            1.0,
            self.args(None),
            self.args(norm),
            out.words,
            NORM=self.rows_config(width, norm),
            OUT=out.config,
            warps=4,
        )
