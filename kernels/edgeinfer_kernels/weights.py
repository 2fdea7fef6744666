"""The weights of a decoder as backends take them: matrices in their file's bytes, vectors in float32."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import decode

Vector = npt.NDArray[np.float32]


class MatrixFacts(Protocol):
    """A weight matrix's name, format and size: all that counting its bytes takes."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...


@dataclass(frozen=True)
class Matrix:
    """A weight matrix: `raw` is (rows, bytes of a row) uint8, most often a view of the memory map."""

    name: str
    format: str
    rows: int
    columns: int
    raw: npt.NDArray[np.uint8]

    def take_rows(self, first: int, last: int) -> "Matrix":
        """The matrix of rows first..last, without a copy."""
        return Matrix(self.name, self.format, last - first, self.columns, self.raw[first:last])

    def decoded(self) -> npt.NDArray[np.float32]:
        """(rows, columns) float32."""
        return decode(self.raw.reshape(-1), self.format).reshape(self.rows, self.columns)

    def decoded_rows(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """(len(indices), columns) float32."""
        if len(indices) == 1:  # a view in place of a copy: this is done for every token
            return decode(self.raw[indices[0]], self.format).reshape(1, self.columns)
        return decode(self.raw[indices].reshape(-1), self.format).reshape(len(indices), self.columns)

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention, by GGUF name; None where the architecture has none."""

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


@dataclass(frozen=True)
class FeedForwardWeights:
    """One layer's feed-forward, by GGUF name; ffn_gate None: ungated."""

    ffn_up: Matrix
    ffn_down: Matrix
    ffn_gate: Matrix | None = None
    ffn_norm: Vector | None = None
    ffn_norm_bias: Vector | None = None
    ffn_gate_bias: Vector | None = None
    ffn_up_bias: Vector | None = None
    ffn_down_bias: Vector | None = None
    ffn_post_norm: Vector | None = None


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights
    feed_forward: FeedForwardWeights


@dataclass(frozen=True)
class DecoderWeights:
    """All of a decoder's weights; `output` is `token_embd` itself where the file ties them."""

    token_embd: Matrix
    output: Matrix
    output_norm: Vector | None
    output_norm_bias: Vector | None
    layers: tuple[LayerWeights, ...]

    def matrices(self) -> list[Matrix]:
        """Every matrix that is multiplied with, each once; the embedding only as a tied head."""
        found = []
        for layer in self.layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            found += [attention.attn_q, attention.attn_k, attention.attn_v, attention.attn_output]
            found += [feed_forward.ffn_up, feed_forward.ffn_down]
            if feed_forward.ffn_gate is not None:
                found.append(feed_forward.ffn_gate)
        return [*found, self.output]
