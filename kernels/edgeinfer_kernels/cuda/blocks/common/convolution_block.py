"""What blocks with a convolution share on a GPU: weights, state, buffers, and the last projection."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.cache.recurrent_states import take_recurrent
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.recurrent_state import RecurrentState

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock


@dataclass(frozen=True)
class DeviceConvolution:
    """The matrices of a block with a convolution on the device, and its taps (taps, channels)."""

    projections: Stack
    output: DeviceMatrix
    taps: Tensor

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.projections.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]


def take_state(
    arena: Arena, spec: RecurrentSpec, positions: int, kind: CacheType, sequences: int = 1
) -> RecurrentState:
    """Allocate the states of some sequences."""
    return take_recurrent(arena, spec.recurrent, sequences=sequences)


def convolution_grid(step: "DecodeStep", tokens: int, pieces: int) -> tuple[int, int, int]:
    """The programs of a step's convolution: positions, pending ones first, pieces, and sequences. A batch has
    no pending positions.
    """
    own, sequences = step.by_sequence(tokens)
    return own if step.is_batch else own + RING_ROWS, pieces, sequences


def inactive_bytes(w: DeviceConvolution) -> int:
    """Bytes of weights that not every token reads."""
    return 0


def take_vectors(builder: DeviceBuilder, *vectors: Vector) -> list[Tensor]:
    """Allocate vectors, flat."""
    taken = [builder.vector(np.ascontiguousarray(each).reshape(-1)) for each in vectors]
    return [vector for vector in taken if vector is not None]


def take_stack(builder: DeviceBuilder, *matrices: Matrix) -> Stack:
    """Allocate matrices that are multiplied with the same rows."""
    return builder.stack([(matrix, None) for matrix in matrices])


class MatrixStatePromptSpace:
    """The buffers of a chunk of a prompt, for all blocks of a kind with `MatrixStateSizes`: the rows of the
    state, the convolution's results with those of pending positions, and the results of the heads.
    """

    def __init__(self, specs: Sequence[Any], arena: Arena, chunk: int) -> None:
        self.rows = arena.take((chunk * max(spec.recurrent.row_width for spec in specs),), torch.float32)
        channels = max(spec.channels for spec in specs)
        self.conv = arena.take(((chunk + RING_ROWS) * channels,), torch.float32)
        self.values = arena.take((chunk * max(spec.result_width for spec in specs),), torch.float32)


class MatrixStateSpace(MatrixStatePromptSpace):
    """The buffers of a decode step: those of a chunk, the projections and the input of the last one."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceConvolution] = [block.weights for block in blocks]
        specs = [block.residual.block for block in blocks]
        super().__init__(specs, arena, step.tokens)
        self.projected = arena.take((step.tokens, max(w.projections.rows for w in weights)), torch.float32)
        width = max(spec.result_width for spec in specs)
        self.conv_out = take_activations(arena, step.tokens, width, has_floats(*(w.output for w in weights)))


def project_back(
    step: "DecodeStep", number: int, block: DeviceBlock, results: Tensor | None, width: int, tokens: int
) -> "Source":
    """The last projection of a decode step, of `results` (tokens, width); None: of `activations_of`."""
    activations = activations_of(step, block)
    if results is not None:
        step.launches.norms.quantize(results, width, activations, tokens)
    return step.close_block(number, block.weights.output, None, activations, "output", tokens)


def activations_of(step: "DecodeStep", block: DeviceBlock) -> Activations:
    """The input of the last projection of a decode step."""
    output: DeviceMatrix = block.weights.output
    conv_out: Activations = step.space(block.residual.block.kind).conv_out
    return conv_out.of_blocks(output.shapes.blocks)


def add_product(
    prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock", results: "ScaledRows"
) -> None:
    """x += W_out · `results` of a chunk."""
    y = prompt.products.product(results.rows, block.weights.output)
    prompt.add(chunk, number, y, None, results.scales)
