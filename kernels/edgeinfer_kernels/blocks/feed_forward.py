"""Dense feed-forward: specification, weights and sizes of one block, which is divisible by neurons."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import (
    NO_NORMS,
    ChunkRows,
    DivisibleSizes,
    NormLengths,
    StepShape,
)
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm, matrix_scale, read_sub_norm
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)


@dataclass(frozen=True)
class LimitedSwiglu:
    """min(silu(gate), limit) · up, with up within ±limit. Source: Step 3.5."""

    limit: float


Activation = Literal["silu", "gelu", "relu", "relu_squared", "clamped_swiglu", "drelu"] | LimitedSwiglu
"""drelu: relu(gate) · relu(up). Source: TurboSparse."""
RELU_ACTIVATIONS: tuple[Activation, ...] = ("relu", "relu_squared", "drelu")
"""Those that are exactly zero for some neurons."""
CLAMPED_SWIGLU_SLOPE = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0
"""clamped_swiglu: with g = min(gate, limit) and u = up within ±limit, g · sigmoid(slope · g) · (u + 1).
Source: gpt-oss.
"""
NEURON_GROUP = 512
"""Neurons that a split feed-forward assigns together: whole blocks of every format, without padding on a GPU.
"""


@dataclass(frozen=True)
class FeedForwardSpec(StatelessSpec):
    """down(activation(gate(x)) · up(x)); without a gate down(activation(up(x))). `sub_norm`: the rows that
    down reads are normalized, and the products of gate and up may have scales.
    """

    kind: ClassVar[str] = "feed_forward"
    is_divisible: ClassVar[bool] = True

    activation: Activation
    neurons: int
    gated: bool = True
    sub_norm: NormSpec | None = None

    def read(self, tensors: TensorReader) -> "FeedForwardWeights":
        width, neurons, gate = tensors.hidden_size, self.neurons, None
        if self.gated and tensors.has_shape("ffn_up", 2 * neurons, width):
            both = tensors.matrix("ffn_up", 2 * neurons, width)
            gate, up = both.take_rows(0, neurons), both.take_rows(neurons, 2 * neurons)
        else:
            up = tensors.matrix("ffn_up", neurons, width)
            if self.gated:
                gate = tensors.matrix("ffn_gate", neurons, width)
        return FeedForwardWeights(
            ffn_up=up,
            ffn_down=tensors.matrix("ffn_down", width, neurons),
            ffn_gate=gate,
            ffn_gate_bias=tensors.vector("ffn_gate.bias", neurons),
            ffn_up_bias=tensors.vector("ffn_up.bias", neurons),
            ffn_down_bias=tensors.vector("ffn_down.bias", width),
            **({} if self.sub_norm is None else self._sub_norm(tensors)),
        )

    def _sub_norm(self, tensors: TensorReader) -> dict[str, Any]:
        return {
            "sub_norm": read_sub_norm(tensors, "ffn_sub_norm", self.neurons, "ffn_down"),
            "gate_scale": matrix_scale(tensors, "ffn_gate"),
            "up_scale": matrix_scale(tensors, "ffn_up"),
        }

    def sizes(self, weights: "FeedForwardWeights", norms: NormLengths) -> "FeedForwardSizes":
        return FeedForwardSizes.of(weights, norms)


@dataclass(frozen=True)
class FeedForwardWeights(BlockWeights):
    """The weights of a feed-forward, by GGUF name; ffn_gate None: no gate."""

    kind: ClassVar[str] = "feed_forward"

    ffn_up: Matrix
    ffn_down: Matrix
    ffn_gate: Matrix | None = None
    ffn_gate_bias: Vector | None = None
    ffn_up_bias: Vector | None = None
    ffn_down_bias: Vector | None = None
    sub_norm: SubNorm | None = None
    gate_scale: float = 1.0
    up_scale: float = 1.0

    def matrices(self) -> list[Matrix]:
        return [self.ffn_up, self.ffn_down] + ([] if self.ffn_gate is None else [self.ffn_gate])

    def of_neurons(self, first: int, last: int) -> "FeedForwardWeights":
        """The part with neurons first..last; the down bias is unchanged."""

        def part(bias: Vector | None) -> Vector | None:
            return None if bias is None else bias[first:last]

        return replace(
            self,
            ffn_up=self.ffn_up.take_rows(first, last),
            ffn_down=self.ffn_down.take_columns(first, last),
            ffn_gate=None if self.ffn_gate is None else self.ffn_gate.take_rows(first, last),
            ffn_gate_bias=part(self.ffn_gate_bias),
            ffn_up_bias=part(self.ffn_up_bias),
        )

    def bare(self) -> "FeedForwardWeights":
        """Only the matrices."""
        return FeedForwardWeights(self.ffn_up, self.ffn_down, self.ffn_gate)


@dataclass(frozen=True)
class FeedForwardSizes(DivisibleSizes):
    """The sizes of a feed-forward, or of one expert. `vectors`: lengths of its norms, also that of the rows
    that down reads, and of the down bias.

    `biased`: gate or up has a bias. `post_normed`: a norm follows the sum. `shared_norm`: the lengths of the
    norm before it, if another block reads that too. `is_followed`: the layer has a block after it.
    `sub_normed`: the rows that down reads are normalized.
    """

    label: ClassVar[str] = "feed-forward"
    granules_label: ClassVar[str] = "feed-forward"
    granule_name: ClassVar[str] = " neurons"
    is_routed: ClassVar[bool] = False

    up: MatrixSize
    down: MatrixSize
    gate: MatrixSize | None = None
    vectors: tuple[int, ...] = ()
    biased: bool = False
    post_normed: bool = False
    shared_norm: tuple[int, ...] = ()
    is_followed: bool = False
    sub_normed: bool = False

    @classmethod
    def of(cls, w: FeedForwardWeights, norms: NormLengths = NO_NORMS) -> "FeedForwardSizes":
        """The sizes of a feed-forward, by default without norms."""
        return cls(
            MatrixSize.of(w.ffn_up),
            MatrixSize.of(w.ffn_down),
            None if w.ffn_gate is None else MatrixSize.of(w.ffn_gate),
            (
                *vector_lengths(w.ffn_down_bias, None if w.sub_norm is None else w.sub_norm.weight),
                *(() if norms.is_shared else norms.vectors),
            ),
            w.ffn_gate_bias is not None or w.ffn_up_bias is not None,
            norms.has_post_norm,
            norms.vectors if norms.is_shared else (),
            norms.is_followed,
            w.sub_norm is not None,
        )

    @property
    def neurons(self) -> int:
        return self.up.rows

    @property
    def granules(self) -> int:
        return self.neurons

    @property
    def is_joined(self) -> bool:
        """The other blocks of the layer follow on their device."""
        return bool(self.shared_norm) or self.is_followed

    def undivided_vectors(self) -> tuple[int, ...]:
        return self.shared_norm

    def granule_counts(self) -> list[int]:
        """In groups of NEURON_GROUP; all or none if a norm is of all neurons or of their sum."""
        inner = () if self.post_normed or self.sub_normed else range(NEURON_GROUP, self.neurons, NEURON_GROUP)
        return [0, *inner, self.neurons]

    def matrices(self) -> Iterator[MatrixSize]:
        yield from self.granule_matrices()

    def undivided(self) -> list[MatrixSize]:
        return []

    def undivided_device_bytes(self) -> int:
        return 0

    def granule_matrices(self) -> list[MatrixSize]:
        return [matrix for matrix in (self.gate, self.up, self.down) if matrix is not None]

    def granules_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.granule_matrices())) + self._bias_bytes + vector_bytes(self.vectors)

    def part(self, granules: int) -> "FeedForwardSizes":
        return replace(
            self,
            up=replace(self.up, rows=granules),
            gate=None if self.gate is None else replace(self.gate, rows=granules),
            down=replace(self.down, columns=granules),
        )

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        return {
            "hidden": 4 * padded(self.neurons),
            "hidden.quantized": quantized_bytes(padded(self.neurons)),
            "gate": 4 * padded(self.neurons),
        }

    def inputs(self) -> list[MatrixSize]:
        return [matrix for matrix in (self.up, self.gate) if matrix is not None]

    def outputs(self) -> list[MatrixSize]:
        return [self.down]

    @classmethod
    def step_bytes(cls, blocks: Sequence["FeedForwardSizes"], step: StepShape) -> int:
        """Padded and whole hidden rows don't share a buffer, because padding must stay zero."""
        padded_rows_only = max((b.neurons for b in blocks if b.neurons % NEURON_GROUP), default=0)
        rows = (padded_rows_only, max(block.neurons for block in blocks))
        floats = max(
            (sum(padded_rows(m.rows) for m in b.inputs()) for b in blocks if b.sub_normed), default=0
        )
        hidden = sum(activation_bytes(step.tokens, each, step.hidden_floats) for each in rows)
        return hidden + taken(step.tokens * floats, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * self.neurons, chunk, chunk * max(2 * self.neurons, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return self._bias_bytes + vector_bytes((*self.vectors, *self.shared_norm))

    @property
    def _bias_bytes(self) -> int:
        return 2 * taken(padded_rows(self.neurons), 4) if self.biased else 0
