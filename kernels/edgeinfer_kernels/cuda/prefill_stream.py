"""A prompt's products with weights of the host: sent to the device in pieces, packed there, multiplied.

Worth it from so many tokens on that sending a matrix takes less time than the host needs to multiply with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import CHUNK_BYTES, Arena, Uploader
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.cuda.plane_formats import ROW_MULTIPLE, PlaneShapes
from edgeinfer_kernels.division import LayerDivision, host_feed_forward, turns_of
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, FeedForwardWeights, Matrix, Vector

PIECE_WORDS = 6 * CHUNK_BYTES // 4
"""Room for a piece in planes, in which no format takes six times what it takes in the file."""
MultiplyRows = Callable[[Tensor, DeviceMatrix, Tensor], None]
"""(rows in the planes' order, some rows of a matrix, out): out = their product."""


@dataclass(frozen=True)
class StreamedFeedForward:
    """The host's part of a dense feed-forward, in its file's bytes; its vectors are on the device."""

    weights: FeedForwardWeights
    norm: Tensor | None
    norm_bias: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def neurons(self) -> int:
        return self.weights.ffn_up.rows


class PromptStream:
    """What the host has of the device's layers, ready to be sent; `least_tokens`: from how many on to do so.

    `parts` are None where nothing is the host's, or what is can't be computed here: a mixture, a norm behind
    the sum, or layers that the host has in the same turn. `weights` and `divisions` are those of the whole
    decoder.
    """

    def __init__(
        self, weights: DecoderWeights, divisions: Sequence[LayerDivision], arena: Arena, least_tokens: int
    ) -> None:
        self.least_tokens = least_tokens
        self._piece = arena.take((PIECE_WORDS,), torch.int32)
        self._vectors: list[tuple[Tensor, Vector]] = []
        self.parts: list[StreamedFeedForward | None] = []
        turns = turns_of(weights, divisions)
        theirs = [index for index, division in enumerate(divisions) if division.attention]
        for index, turn in zip(theirs, turns.within, strict=True):
            alone = turn and len(turns.host[turn - 1]) == 1
            part = host_feed_forward(weights.layers[index], divisions[index]) if alone else None
            self.parts.append(self._part(part, arena))
        self._uploader: Uploader | None = None

    def _part(self, w: FeedForwardWeights | ExpertWeights | None, arena: Arena) -> StreamedFeedForward | None:
        if not isinstance(w, FeedForwardWeights) or w.ffn_post_norm is not None:
            return None

        def taken(vector: Vector | None) -> Tensor | None:
            if vector is None:
                return None
            tensor = arena.take((len(vector),), torch.float32)
            self._vectors.append((tensor, vector))
            return tensor

        vectors = (w.ffn_norm, w.ffn_norm_bias, w.ffn_gate_bias, w.ffn_up_bias, w.ffn_down_bias)
        return StreamedFeedForward(w, *map(taken, vectors))

    def fill(self, uploader: Uploader) -> None:
        """Bring the vectors into place; `uploader` is the way of all weights from now on."""
        for tensor, vector in self._vectors:
            tensor.copy_(torch.from_numpy(vector))
        self._vectors.clear()
        self._uploader = uploader

    def multiply(self, rows: Tensor, matrix: Matrix, out: Tensor, product: MultiplyRows) -> None:
        """out (tokens, rows of the matrix) float32 = rows, in the planes' order, times the matrix."""
        assert self._uploader is not None
        for first, raw in self._uploader.chunks(matrix.raw, ROW_MULTIPLE):
            piece = self._planes(matrix, len(raw))
            piece.fill(0, raw)
            product(rows, piece, out[:, first : first + len(raw)])

    def _planes(self, matrix: Matrix, rows: int) -> DeviceMatrix:
        """Room for so many rows of a matrix."""
        shapes = PlaneShapes.of(matrix.name, matrix.format, rows, matrix.columns)
        tensors, at = [], 0
        for shape in (shapes.words, shapes.scales, shapes.supers):
            size = torch.Size(shape).numel()
            tensors.append(self._piece[at : at + size].view(shape))
            at += -(-size // 64) * 64
        return DeviceMatrix(shapes, matrix.format, *tensors)

    def close(self) -> None:
        """Give the pinned memory back."""
        if self._uploader is not None:
            self._uploader.close()
