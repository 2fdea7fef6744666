"""A predictor of active neurons: two small matrices that guess which neurons a token will need."""

from dataclasses import dataclass, replace

from edgeinfer_kernels.weights import Matrix, Vector


@dataclass(frozen=True)
class NeuronPredictor:
    """A neuron is taken for active where second · (first · x) + bias > 0, x being the normed input.

    `first` (rank, width) and `second` (neurons, rank), of whatever format the row kernels know; rank is a
    multiple of 32. Source: PowerInfer §5, Deja Vu §3.2: a low-rank predictor for each layer.
    """

    first: Matrix
    second: Matrix
    bias: Vector

    @property
    def rank(self) -> int:
        return self.first.rows

    def of_neurons(self, first: int, last: int) -> "NeuronPredictor":
        """The part that guesses neurons first..last."""
        return replace(self, second=self.second.take_rows(first, last), bias=self.bias[first:last])

    @property
    def nbytes(self) -> int:
        """Bytes that a token reads of it."""
        return self.first.nbytes + self.second.nbytes + self.bias.nbytes
