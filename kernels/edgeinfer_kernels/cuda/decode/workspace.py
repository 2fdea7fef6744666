"""The buffers of a decode step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.states.state_ring import StateRing
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix, GatheredSpace
from edgeinfer_kernels.cuda.tensor.collective import Collective
from edgeinfer_kernels.cuda.triton_ops.kernel_args import WordsConfig
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, padded_blocks
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS, STATE_WORDS
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.weights.device_model import DeviceModel

ROWS = 16


@dataclass(frozen=True)
class Activations:
    """A buffer of activations (tokens, planes, blocks) int32."""

    words: Tensor
    planes: int
    blocks: int

    @property
    def config(self) -> WordsConfig:
        """The layout for kernels."""
        return WordsConfig(self.blocks, self.planes)

    def of_blocks(self, blocks: int) -> "Activations":
        """The same memory with a shorter row length."""
        return Activations(self.words, self.planes, blocks)

    def after(self, rows: int) -> "Activations":
        """Those after the first `rows`."""
        return Activations(self.words[rows:], self.planes, self.blocks)


def has_floats(*matrices: DeviceMatrix) -> bool:
    """Whether one of the matrices is in a float format, which needs float activations."""
    return any(matrix.shapes.tile.code in FLOAT_CODES for matrix in matrices)


def take_activations(
    arena: Arena, tokens: int, columns: int, floats: bool, rows_per_token: int = 1
) -> Activations:
    """Allocate activations of `columns` elements."""
    planes, blocks = 44 if floats else 12, padded_blocks(columns)
    return Activations(arena.take((rows_per_token * tokens, planes, blocks), torch.int32), planes, blocks)


def _gathered(blocks: Sequence[DeviceBlock], arena: Arena, width: int) -> GatheredSpace | None:
    downs = [matrix for block in blocks for matrix in block.weights.outputs]
    neurons = [matrix.shapes.columns for matrix in downs if isinstance(matrix, ColumnMatrix)]
    return GatheredSpace(arena, max(neurons), width) if neurons else None


class Workspace:
    """The buffers of a decode step; in a counting arena only their size is counted. `spaces`: those of each
    block kind; `kept_states`: how many states are kept for a draft head, and after which layers.
    """

    def __init__(
        self, model: "DeviceModel", arena: Arena, kept_states: int = 0, kept_layers: tuple[int, ...] = ()
    ) -> None:
        tokens, width, blocks = MAX_TOKENS, model.spec.hidden_size, model.blocks
        inputs = [matrix for block in blocks for matrix in block.weights.inputs]
        self.state = arena.take((STATE_WORDS,), torch.int32)
        self.pages = arena.take((tokens, model.positions // PAGE), torch.int32)
        """The cache pages of each sequence of a batch."""
        self.x = arena.take((tokens, width), torch.float32)
        self.y = arena.take((tokens, padded_rows(width)), torch.float32)
        self.arrived = arena.take((padded_rows(width) // ROWS,), torch.int32)
        """The programs that have added to each sixteen rows of y, if several share them."""
        normed_floats = has_floats(model.head, *inputs)
        self.normed_input = [take_activations(arena, tokens, width, normed_floats) for _ in range(2)]
        has_own = any(block.residual.has_own_norm for block in blocks)
        self.own_input = take_activations(arena, tokens, width, normed_floats) if has_own else None
        """The input of a block that shares x with another one, but not the norm."""
        self.sum_squares = [arena.take((tokens, padded_rows(width) // ROWS), torch.float32) for _ in range(2)]
        self.spaces = self._take_spaces(blocks, arena, has_floats(*inputs), width)
        self.logits = arena.take((tokens, model.vocabulary), torch.float32)
        self._part = model.part
        rows = max(map(len, model.part.vocabulary)) if model.part else 0
        self._own = arena.take((tokens * rows,), torch.float32)
        self._gathered = arena.take((model.part.ranks if model.part else 0, tokens * rows), torch.float32)
        own = self._own[: tokens * model.spec.vocabulary_size].view(tokens, -1) if model.part else None
        self.own_logits = self.logits if own is None else own
        """Those of this rank's rows of the head."""
        programs = model.head.shapes.padded_rows // ROWS
        self.best = arena.take((tokens, programs), torch.float32)
        self.best_ids = arena.take((tokens, programs), torch.int32)
        self.gathered = _gathered(blocks, arena, width)
        """The buffers of feed-forwards that read only active neurons; None: there is none."""
        self.kept = StateRing.take(arena, kept_states, width, kept_layers)
        """The states of the last positions for a draft head; None: it has none."""
        self.nothing = model.head.words  # Dummy pointer for kernel arguments that are not used.

    def gather_logits(self, collective: Collective, tokens: int) -> None:
        """logits = those of the first `tokens` of all ranks."""
        assert self._part is not None, "only a rank of tensor parallel gathers logits"
        length = tokens * self._own.numel() // MAX_TOKENS
        gathered = self._gathered.view(-1)[: self._part.ranks * length]
        collective.gather(self._own[:length], gathered)
        for number, rows in enumerate(self._part.vocabulary):
            first = number * length
            part = gathered[first : first + tokens * len(rows)].view(tokens, len(rows))
            self.logits[:tokens, rows.start : rows.stop].copy_(part)

    @staticmethod
    def _take_spaces(
        blocks: Sequence[DeviceBlock], arena: Arena, input_floats: bool, width: int
    ) -> dict[str, Any]:
        kinds: dict[str, list[DeviceBlock]] = {}
        for block in blocks:
            kinds.setdefault(block.residual.block.kind, []).append(block)
        downs = [
            matrix
            for block in blocks
            if block.residual.block.is_divisible
            for matrix in block.weights.outputs
        ]
        step = StepShape(MAX_TOKENS, width, input_floats, has_floats(*downs))
        return {kind: device_module(kind).Space(specs, arena, step) for kind, specs in kinds.items()}
