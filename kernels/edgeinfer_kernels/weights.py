"""The weights of a decoder as backends take them: matrices in file format, vectors in float32."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import block_format, decode

Vector = npt.NDArray[np.float32]


class MatrixFacts(Protocol):
    """Name, format and size of a weight matrix, from which its byte size follows."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def experts(self) -> int: ...


@dataclass(frozen=True)
class Matrix:
    """A weight matrix: `raw` is (rows, bytes per row) uint8, usually a view of the memory-mapped file.

    With `experts`, `raw` holds that many matrices of (rows, columns), stacked along the rows. `picked`
    restricts it to these expert indices, in this order.
    """

    name: str
    format: str
    rows: int
    columns: int
    raw: npt.NDArray[np.uint8]
    experts: int = 1
    picked: tuple[int, ...] = ()

    def expert(self, index: int) -> "Matrix":
        """One expert's matrix, without a copy."""
        first = (self.picked[index] if self.picked else index) * self.rows
        raw = self.raw[first : first + self.rows]
        return Matrix(self.name, self.format, self.rows, self.columns, raw)

    def take_rows(self, first: int, last: int) -> "Matrix":
        """The matrix of rows first..last, without a copy."""
        return Matrix(self.name, self.format, last - first, self.columns, self.raw[first:last])

    def take_columns(self, first: int, last: int) -> "Matrix":
        """The matrix of columns first..last, in whole blocks of its format; its rows are not contiguous in
        memory.

        Raises `FormatError`: a block would be cut.
        """
        row_bytes = block_format(self.format).row_bytes
        begin, end = (row_bytes(column) if column else 0 for column in (first, last))
        raw = self.raw[:, begin:end]
        return Matrix(self.name, self.format, self.rows, last - first, raw)

    def take_experts(self, numbers: Sequence[int]) -> "Matrix":
        """The matrices of these experts, in this order, without a copy."""
        first, count = (numbers[0] if numbers else 0), len(numbers)
        if list(numbers) == list(range(first, first + count)):
            raw = self.raw[first * self.rows : (first + count) * self.rows]
            return replace(self, raw=raw, experts=count)
        return replace(self, experts=count, picked=tuple(numbers))

    def decoded(self) -> npt.NDArray[np.float32]:
        """(rows, columns) float32; with `experts`, the rows of all experts."""
        if self.picked:
            return np.concatenate([self.expert(index).decoded() for index in range(self.experts)])
        return decode(self.raw.reshape(-1), self.format).reshape(-1, self.columns)

    def decoded_rows(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """(len(indices), columns) float32."""
        if len(indices) == 1:  # A view avoids a copy, because this runs for every token.
            return decode(self.raw[indices[0]], self.format).reshape(1, self.columns)
        return decode(self.raw[indices].reshape(-1), self.format).reshape(len(indices), self.columns)

    @property
    def place(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Memory address, shape and strides of the raw bytes; equal only for two views of the same
        weights.
        """
        return self.raw.ctypes.data, self.raw.shape, self.picked

    @property
    def nbytes(self) -> int:
        return self.experts * self.rows * int(self.raw.shape[1])


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of one layer, by GGUF name; None where the architecture has no such weight."""

    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    attn_norm: Vector | None = None
    attn_norm_bias: Vector | None = None
    attn_q_bias: Vector | None = None
    attn_k_bias: Vector | None = None
    attn_v_bias: Vector | None = None
    attn_output_bias: Vector | None = None
    attn_q_norm: Vector | None = None
    attn_k_norm: Vector | None = None
    attn_post_norm: Vector | None = None
    attn_sinks: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return [self.attn_q, self.attn_k, self.attn_v, self.attn_output]


@dataclass(frozen=True)
class FeedForwardWeights:
    """The feed-forward of one layer, by GGUF name; ffn_gate None: no gate."""

    ffn_up: Matrix
    ffn_down: Matrix
    ffn_gate: Matrix | None = None
    ffn_norm: Vector | None = None
    ffn_norm_bias: Vector | None = None
    ffn_gate_bias: Vector | None = None
    ffn_up_bias: Vector | None = None
    ffn_down_bias: Vector | None = None
    ffn_post_norm: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return [self.ffn_up, self.ffn_down] + ([] if self.ffn_gate is None else [self.ffn_gate])

    def of_neurons(self, first: int, last: int) -> "FeedForwardWeights":
        """The part with neurons first..last; the norms and the down bias are unchanged."""

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
class ExpertWeights:
    """One MoE layer, by GGUF name; the biases of the experts are concatenated.

    `shared` is a feed-forward that is applied to every token, without norms. Its result is multiplied by
    sigmoid(ffn_gate_inp_shexp · h) if that vector exists.
    """

    ffn_gate_inp: Matrix
    ffn_up_exps: Matrix
    ffn_down_exps: Matrix
    ffn_gate_exps: Matrix
    ffn_norm: Vector
    ffn_gate_inp_bias: Vector | None = None
    ffn_up_exps_bias: Vector | None = None
    ffn_down_exps_bias: Vector | None = None
    ffn_gate_exps_bias: Vector | None = None
    shared: FeedForwardWeights | None = None
    ffn_gate_inp_shexp: Vector | None = None

    def expert(self, index: int) -> FeedForwardWeights:
        """One expert as a feed-forward without norms."""

        def bias(stack: Matrix, biases: Vector | None) -> Vector | None:
            return None if biases is None else biases[index * stack.rows : (index + 1) * stack.rows]

        return FeedForwardWeights(
            ffn_up=self.ffn_up_exps.expert(index),
            ffn_down=self.ffn_down_exps.expert(index),
            ffn_gate=self.ffn_gate_exps.expert(index),
            ffn_gate_bias=bias(self.ffn_gate_exps, self.ffn_gate_exps_bias),
            ffn_up_bias=bias(self.ffn_up_exps, self.ffn_up_exps_bias),
            ffn_down_bias=bias(self.ffn_down_exps, self.ffn_down_exps_bias),
        )

    def of_experts(self, numbers: Sequence[int]) -> "ExpertWeights":
        """The MoE layer with only these experts, in this order; the router still selects from all."""

        def part(stack: Matrix, biases: Vector | None) -> Vector | None:
            return None if biases is None else biases.reshape(-1, stack.rows)[list(numbers)].reshape(-1)

        return replace(
            self,
            ffn_up_exps=self.ffn_up_exps.take_experts(numbers),
            ffn_down_exps=self.ffn_down_exps.take_experts(numbers),
            ffn_gate_exps=self.ffn_gate_exps.take_experts(numbers),
            ffn_gate_exps_bias=part(self.ffn_gate_exps, self.ffn_gate_exps_bias),
            ffn_up_exps_bias=part(self.ffn_up_exps, self.ffn_up_exps_bias),
            ffn_down_exps_bias=part(self.ffn_down_exps, self.ffn_down_exps_bias),
        )

    def stacks(self) -> list[Matrix]:
        """The stacked matrices of the experts."""
        return [self.ffn_up_exps, self.ffn_down_exps, self.ffn_gate_exps]

    def every_token(self) -> list[Matrix]:
        """The matrices that each token is multiplied with: router and shared expert."""
        return [self.ffn_gate_inp, *([] if self.shared is None else self.shared.matrices())]

    def matrices(self) -> list[Matrix]:
        return [*self.stacks(), *self.every_token()]


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights
    feed_forward: FeedForwardWeights | ExpertWeights


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder; `output` is `token_embd` itself if the file ties them."""

    token_embd: Matrix
    output: Matrix
    output_norm: Vector | None
    output_norm_bias: Vector | None
    layers: tuple[LayerWeights, ...]

    def below(self, layer: int) -> "DecoderWeights":
        """The embedding and the layers before `layer`, for a backend that runs only these."""
        return replace(self, layers=self.layers[:layer])

    def above(self, layer: int) -> "DecoderWeights":
        """The layers from `layer` on, and the head."""
        return replace(self, layers=self.layers[layer:])

    def matrices(self, *, head: bool = True) -> list[Matrix]:
        """Every matrix that takes part in a matmul, each once; the embedding only if it is a tied head."""
        found = []
        for layer in self.layers:
            found += [*layer.attention.matrices(), *layer.feed_forward.matrices()]
        return [*found, self.output] if head else found
