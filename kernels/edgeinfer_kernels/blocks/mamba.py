"""Mamba-1: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.convolution_sizes import ConvolutionSizes, stacked_rows
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    row_runs,
    taken,
)


@dataclass(frozen=True)
class MambaSpec(RecurrentSpec):
    """A state space model with a state S (channels, state_size) whose decay is selected by the input.

    x, z = W_in h; u = silu(conv(x) + bias); dt, B, C = W_x u; Δ = softplus(W_dt dt + bias):
    S ← e^(Δ A) S + Δ u Bᵀ; y = S C + D u. The result is W_out (y · silu(z)).

    `dt_rank`: length of dt. `norm`: its ε is that of the RMS norms of dt, B and C, if there are any;
    `always_normed`: there are, with or without weights.
    """

    kind: ClassVar[str] = "mamba"

    channels: int
    state_size: int
    dt_rank: int
    taps: int
    norm: NormSpec
    always_normed: bool = False
    slots: int = 2

    @property
    def recurrent(self) -> RecurrentShape:
        """Rows: x before the convolution, Δ, B. Matrix: (channels / 16, state_size, 16), sixteen channels of
        S after each other.
        """
        width = padded(self.channels)
        row = 2 * width + padded(self.state_size)
        return RecurrentShape(self.taps - 1, width, row, width * self.state_size, self.slots, self.state_size)

    def read(self, tensors: TensorReader) -> "MambaWeights":
        width, channels, size, rank = tensors.hidden_size, self.channels, self.state_size, self.dt_rank
        both = tensors.matrix("ssm_in", 2 * channels, width)
        selected = tensors.matrix("ssm_x", rank + 2 * size, channels)
        lengths = {"ssm_dt_norm": rank, "ssm_b_norm": size, "ssm_c_norm": size}
        norms = [tensors.vector(f"{name}.weight", length) for name, length in lengths.items()]
        if self.always_normed or all(norm is not None for norm in norms):
            ones = [np.ones(length, np.float32) for length in lengths.values()]
            norms = [one if norm is None else norm for norm, one in zip(norms, ones, strict=True)]
        else:
            norms = [None, None, None]
        taps = tensors.required("ssm_conv1d.weight", channels * self.taps)
        return MambaWeights(
            both.take_rows(0, channels),
            both.take_rows(channels, 2 * channels),
            selected.take_rows(0, rank),
            selected.take_rows(rank, rank + size),
            selected.take_rows(rank + size, rank + 2 * size),
            tensors.matrix("ssm_dt", channels, rank),
            tensors.matrix("ssm_out", width, channels),
            taps=taps.reshape(channels, self.taps).T,
            taps_bias=tensors.required("ssm_conv1d.bias", channels),
            dt_bias=tensors.required("ssm_dt.bias", channels),
            a=tensors.required("ssm_a", channels * size).reshape(channels, size),
            skip=tensors.required("ssm_d", channels),
            dt_norm=norms[0],
            b_norm=norms[1],
            c_norm=norms[2],
        )

    def sizes(self, weights: "MambaWeights", norms: NormLengths) -> "MambaSizes":
        w = weights
        vectors = vector_lengths(w.dt_norm, w.b_norm, w.c_norm)
        own = (self.channels * self.taps, *3 * (self.channels,), padded(self.channels) * self.state_size)
        x, z, *selection, delta, output = map(MatrixSize.of, w.matrices())
        lengths = (*own, *vectors, *norms.vectors)
        return MambaSizes(self, (x, z), output, lengths, tuple(selection), delta)


@dataclass(frozen=True)
class MambaWeights(BlockWeights):
    """The weights of a Mamba block: the row ranges of W_in and W_x, then W_dt and W_out. taps: (taps,
    channels), the last for the token itself. a: (channels, state_size). The norms are all there, or none.
    """

    kind: ClassVar[str] = "mamba"

    x: Matrix
    z: Matrix
    dt: Matrix
    b: Matrix
    c: Matrix
    delta: Matrix
    output: Matrix
    taps: Vector
    taps_bias: Vector
    dt_bias: Vector
    a: Vector
    skip: Vector
    dt_norm: Vector | None
    b_norm: Vector | None
    c_norm: Vector | None

    def matrices(self) -> list[Matrix]:
        return [self.x, self.z, self.dt, self.b, self.c, self.delta, self.output]


@dataclass(frozen=True)
class MambaSizes(ConvolutionSizes):
    """The sizes of a Mamba block. `selection`: the matrices of dt, B and C."""

    label: ClassVar[str] = "mamba"

    spec: MambaSpec
    selection: tuple[MatrixSize, ...]
    delta: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [*self.projections, *self.selection, self.delta, self.output]

    def undivided_device_bytes(self) -> int:
        own = sum(map(matrix_bytes, [*self._selected(), self.delta]))
        return super().undivided_device_bytes() + own

    def state_operations(self, tokens: int, start: int) -> float:
        """Three operations with each element of the state, and the convolution."""
        spec = self.spec
        return 2 * tokens * spec.channels * (3 * spec.state_size + spec.taps)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        channels, rank = padded(self.spec.channels), padded(self.spec.dt_rank)
        return {
            "state_rows": 4 * self.spec.recurrent.row_width,
            "conv_rows": 4 * channels,
            "conv_rows.quantized": quantized_bytes(channels),
            "mamba_dt": 4 * rank,
            "mamba_dt.quantized": quantized_bytes(rank),
            "mamba_c": 4 * padded(self.spec.state_size),
            "projected_z": 4 * channels,
            "attn_out": 4 * channels,
            "attn_out.quantized": quantized_bytes(channels),
        }

    def _selected(self) -> list[MatrixSize]:
        """The matrices of dt, B and C, as a GPU multiplies them."""
        return row_runs(self.selection)

    @classmethod
    def step_bytes(cls, blocks: Sequence["MambaSizes"], step: StepShape) -> int:
        """x and z; u with its activations; dt, B and C, and dt's activations; W_dt dt; rows of the state; and
        the input of the last projection.
        """
        channels = max(block.spec.channels for block in blocks)
        rank = max(block.spec.dt_rank for block in blocks)
        stacks = [(block.stacked_inputs(), block._selected()) for block in blocks]
        both, selected = (max(map(stacked_rows, runs)) for runs in zip(*stacks, strict=True))
        activations = [
            (channels, [each for block in blocks for each in block.selection]),
            (rank, [block.delta for block in blocks]),
            (channels, [block.output for block in blocks]),
        ]
        floats = [
            step.tokens * both,
            step.tokens * selected,
            step.tokens * padded_rows(channels),
            step.tokens * max(block.spec.recurrent.row_width for block in blocks),
            step.tokens * channels,
            step.tokens * rank,
            step.tokens * channels,
        ]
        words = (activation_bytes(step.tokens, width, has_floats(read)) for width, read in activations)
        return sum(words) + sum(taken(count, 4) for count in floats)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["MambaSizes"], chunk: int, hidden_size: int) -> int:
        """z; rows of the state; u; C; and the results of the recurrence."""
        channels = max(block.spec.channels for block in blocks)
        rows = chunk * max(block.spec.recurrent.row_width for block in blocks)
        selected = chunk * max(block.spec.state_size for block in blocks)
        return taken(rows, 4) + taken(selected, 4) + 3 * taken(chunk * channels, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        rows = max(2 * self.spec.channels, hidden_size, self.spec.dt_rank + 2 * self.spec.state_size)
        return ChunkRows(chunk * max(self.spec.channels, self.spec.dt_rank), chunk, chunk * rows)


def packed_decay(a: Vector) -> Vector:
    """A (channels, state_size) in the layout of the state: (channels / 16, state_size, 16)."""
    channels, size = a.shape
    wide = np.pad(a, ((0, padded(channels) - channels), (0, 0)))
    return np.ascontiguousarray(wide.reshape(-1, 16, size).swapaxes(1, 2))
