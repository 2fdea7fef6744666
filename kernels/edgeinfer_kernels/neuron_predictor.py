"""A predictor of active neurons: two low-rank matrices that predict which neurons a token activates."""

from dataclasses import dataclass, replace

from edgeinfer_kernels.matrix import Matrix, Vector


@dataclass(frozen=True)
class NeuronPredictor:
    """A neuron is predicted active where second · (first · x) + bias > 0; x is the normed input.

    `rectified`: where second · relu(r · (first · x)) + bias > 0; r is the root mean square of the input
    before its norm, as PowerInfer's predictors read that.

    `first` (rank, hidden_size) and `second` (neurons, rank) are quantized, `first` in a format of sparse
    layers; rank is a multiple of 32.

    Source: PowerInfer §5, Deja Vu §3.2: a low-rank predictor for each layer.
    """

    first: Matrix
    second: Matrix
    bias: Vector
    rectified: bool = False

    @property
    def rank(self) -> int:
        return self.first.rows

    def of_neurons(self, first: int, last: int) -> "NeuronPredictor":
        """The predictor of neurons first..last."""
        return replace(self, second=self.second.take_rows(first, last), bias=self.bias[first:last])

    @property
    def nbytes(self) -> int:
        """Bytes of it that are read per token."""
        return self.first.nbytes + self.second.nbytes + self.bias.nbytes
