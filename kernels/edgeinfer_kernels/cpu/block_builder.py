"""Builds the structures that all block kernels read: matrices, norms, inputs, and the head."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.own_norms import OWN_INPUT
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.blocks.embedding.draft_input import PAIR
from edgeinfer_kernels.blocks.feed_forward import Activation, LimitedSwiglu
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.layout.packed_matrix import (
    Arena,
    group_bytes,
    is_float_format,
    kernel_columns,
    kernel_format,
    padded_rows,
    padded_vector,
)
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_CODES, SHARED_INPUT, TILE_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import HeadArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import InputArgs, MatrixArgs, NormArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import NormRowsArgs, RecurrentArgs
from edgeinfer_kernels.decoder import DecoderWeights, ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.recurrent_state import RecurrentState
from edgeinfer_kernels.sizes.cpu_workspace import OwnRows, Workspace

NORM_KINDS = {"rms": 1, "layer": 2}
NORMED = "normed"
"""The buffer of the normed x, which parallel blocks share."""
NO_TILES = 1 << 40
"""More tokens than any step has."""
Counts = npt.NDArray[np.int64]


class PackedMatrix(NamedTuple):
    """A matrix as kernels see it: the addresses of its GEMV kernel, of that kernel's weights, and of the AMX
    kernel or 0; and the bytes of weights per expert.
    """

    kernel: int
    weights: int
    tile_kernel: int = 0
    expert_stride: int = 0


class AdaptableMatrix(NamedTuple):
    """A matrix, the address of its MatrixArgs, and the factor of its products."""

    matrix: Matrix
    args: int
    scale: float


class RoutingRows(NamedTuple):
    """Destination of a layer's expert ids: an address, and the stride in bytes between tokens."""

    ids: int
    stride: int


class BlockOptions(NamedTuple):
    """What some block kinds need besides their specification, weights and state.

    `routing`: where the selected experts are written, or read if another device selects them;
    `expert_weights`: then the address of their weights. `requests`: counts the requests of each expert.
    """

    routing: RoutingRows | None = None
    expert_weights: int = 0
    requests: Counts | None = None


NO_OPTIONS = BlockOptions()


class Call(NamedTuple):
    """A kernel, by name, and the address of the structure that it reads.

    `ends_by_token`: its last phase writes a token's x on the thread that reads it in the first phase of the
    next kernel, so that no barrier is needed between them in a decode step. `ends_everywhere`: after a decode
    step every thread sees the x of all tokens. `begins_by_token`: its first phase reads a token's x on one
    thread.
    """

    kernel: str
    block: int
    ends_by_token: bool = False
    ends_everywhere: bool = False
    begins_by_token: bool = False


class BuiltBlock(NamedTuple):
    """The kernels of a block: those that run before the layer's first block, and its own."""

    calls: tuple[Call, ...]
    before_layer: tuple[Call, ...] = ()
    before_parallel: tuple[Call, ...] = ()
    """Those that run before the first of the blocks that share their input."""
    rope: RopeSpec | None = None
    """The RoPE whose table the kernels read."""


def _own_inputs(shared: InputArgs, rows: OwnRows) -> Any:
    """The InputArgs of each thread; the first thread's rows are the shared ones, which others read later."""
    made = (InputArgs * rows.threads)()
    for thread, args in enumerate(made):
        floats, quantized = rows.of(thread) if thread else (shared.floats, shared.quantized)
        args.floats, args.float_stride = floats, shared.float_stride
        args.quantized, args.quantized_stride = quantized if shared.quantized else 0, shared.quantized_stride
        args.columns, args.tile_tokens = shared.columns, shared.tile_tokens
    return made


class BlockBuilder:
    """Builds the structures of a decoder with the packed matrices `packed` (keyed by id).

    `parallel`: the matrices of all blocks that share the input of the one being built, some of which read its
    normed rows; empty if it shares none.
    """

    def __init__(
        self,
        arena: Arena,
        workspace: Workspace,
        packed: dict[int, PackedMatrix],
        width: int,
    ) -> None:
        self.arena = arena
        self.workspace = workspace
        self._packed = packed
        self.width = width
        self.parallel: Sequence[Matrix] = ()
        self.adaptable: list[AdaptableMatrix] = []
        """The structures of the matrices that can have a LoRA adapter."""
        self.assignment_inputs: list[tuple[int, int]] = []
        """The InputArgs of token-expert assignments without float32 rows, and their rows per token."""
        self._normed: list[int] = []
        """The InputArgs of the normed x, except those that parallel blocks share."""

    def norm(self, norm: NormSpec, width: int, weight: Vector | None, bias: Vector | None = None) -> int:
        """A NormArgs structure; without a weight of kind 0, which copies its input."""
        return self.arena.fill(
            NormArgs,
            kind=NORM_KINDS[norm.kind] if weight is not None else 0,
            epsilon=norm.epsilon,
            weight=self.arena.keep(padded_vector(weight)),
            bias=self.arena.keep(padded_vector(bias)),
            width=width,
            padded=padded(width),
        )

    def sub_norm(self, norm: NormSpec, sub_norm: SubNorm | None) -> int:
        """A NormArgs structure of a norm before a block's last projection; 0: there is none."""
        if sub_norm is None:
            return 0
        return self.norm(sub_norm.spec(norm), len(sub_norm.weight), sub_norm.weight)

    def matrix(
        self, matrix: Matrix, bias: Vector | None = None, scale: float = 1.0, adaptable: bool = True
    ) -> int:
        """A MatrixArgs structure; the bias has a row for each expert. `scale`: of gate and up. `adaptable`
        False: the kernel that reads it ignores LoRA adapters.
        """
        name = kernel_format(matrix)
        packed = self._packed[id(matrix)]
        rows = None if bias is None else padded_rows(bias.reshape(matrix.experts, -1))
        args = self.arena.fill(
            MatrixArgs,
            kernel=packed.kernel,
            tile_kernel=packed.tile_kernel,
            weights=packed.weights,
            group_bytes=group_bytes(matrix),
            rows=matrix.rows,
            columns=kernel_columns(name, matrix.columns),
            quantized=0 if is_float_format(matrix) else 1,
            bias=self.arena.keep(rows),
            expert_stride=packed.expert_stride,
            bias_stride=4 * padded(matrix.rows),
            scale=scale,
            scales=self.arena.keep(matrix.scales),
        )
        if adaptable:
            self.adaptable.append(AdaptableMatrix(matrix, args, scale))
        return args

    def input(
        self,
        name: str,
        columns: int,
        readers: list[Matrix],
        strides: tuple[int, int] | None = None,
        keep_floats: bool = True,
        tiles: bool = True,
    ) -> int:
        """The rows that `readers` are multiplied with: float32 if they are kept, and int8 or tiles if any
        reader needs them.

        `strides`: bytes per row of both, if there are several rows per token. `tiles` False: the readers
        multiply a part of the columns, which tiles don't permit.
        """
        floats, float_stride = self.workspace.rows(name) if keep_floats else (0, 0)
        quantized, quantized_stride = 0, 0
        shared = self.parallel if name in (NORMED, PAIR) else ()
        takers = [matrix for matrix in (*readers, *shared) if not is_float_format(matrix)]
        if takers:
            quantized, quantized_stride = self.workspace.rows(f"{name}.quantized")
        if strides is not None:
            float_stride, quantized_stride = strides
        tiles = tiles and all(self._packed[id(matrix)].tile_kernel for matrix in takers)
        args = self.arena.fill(
            InputArgs,
            floats=floats,
            float_stride=float_stride,
            quantized=quantized,
            quantized_stride=quantized_stride,
            columns=columns,
            tile_tokens=TILE_TOKENS if tiles else NO_TILES,
        )
        if name == NORMED and not shared:
            self._normed.append(args)
        return args

    def give_own_rows(self) -> None:
        """Let each thread compute the normed x of steps of few tokens in rows that no other thread reads:
        between all kernels that were built, every thread sees x.
        """
        rows, found = self.workspace.own_rows, dict[tuple[int, ...], int]()
        if rows is None:
            return
        for at in self._normed:
            args = InputArgs.from_address(at)
            key = args.quantized, args.columns, args.tile_tokens
            if key not in found:
                found[key] = self.arena.keep_args(_own_inputs(args, rows))
            args.own, args.own_tokens = found[key], rows.tokens
        self._normed = []

    def norms(self, residual: ResidualBlock[Any], w: ResidualWeights[Any]) -> dict[str, float]:
        """The fields of the norms before and after a block, and its residual scale."""
        if residual.shares_input:  # Also one with its own norm, which `own_norm` has computed.
            norm = self.arena.fill(NormArgs, kind=SHARED_INPUT, width=self.width, padded=padded(self.width))
        else:
            norm = self.norm(residual.norm, self.width, w.norm, w.norm_bias)
        return {
            "norm": norm,
            "post_norm": self.norm(residual.post_norm_spec, self.width, w.post_norm),
            "residual_scale": residual.residual_scale,
        }

    def own_norm(
        self, residual: ResidualBlock[Any], w: ResidualWeights[Any], readers: list[Matrix]
    ) -> tuple[Call, ...]:
        """The kernel that writes the rows of a norm that a parallel block doesn't share; none otherwise."""
        if not residual.has_own_norm:
            return ()
        norm = self.norm(residual.norm, self.width, w.norm, w.norm_bias)
        block = self.arena.fill(NormRowsArgs, norm=norm, normed=self.input(OWN_INPUT, self.width, readers))
        return (Call("norm_rows_block", block),)

    def activation(self, activation: Activation) -> int:
        """The code of an activation function, or the address of the float32 limit of `LimitedSwiglu`."""
        if isinstance(activation, LimitedSwiglu):
            return self.arena.keep(np.array([activation.limit], np.float32))
        return ACTIVATION_CODES[activation]

    def recurrent(self, state: RecurrentState) -> int:
        """A RecurrentArgs structure; the step's rows are in the buffer "state_rows"."""
        shape = state.shape
        rows, row_stride = self.workspace.rows("state_rows")
        return self.arena.fill(
            RecurrentArgs,
            rows=rows,
            row_stride=row_stride,
            row_bytes=4 * shape.row_width,
            ring=self.arena.keep(state.ring),
            slots=self.arena.keep(state.slots),
            slot_bytes=4 * shape.slot_width,
            tail_rows=shape.tail_rows,
            tail_bytes=4 * shape.tail_width,
            matrix_at=4 * shape.tail_rows * shape.tail_width,
        )

    def scratch(self) -> dict[str, int]:
        return {"scratch": self.workspace.scratch, "scratch_stride": self.workspace.scratch_stride}

    def head(self, norm: NormSpec, weights: DecoderWeights) -> int:
        """A HeadArgs structure; each call sets the address of its logits."""
        return self.arena.fill(
            HeadArgs,
            norm=self.norm(norm, self.width, weights.output_norm, weights.output_norm_bias),
            matrix=self.matrix(weights.output),
            normed=self.input("normed", self.width, [weights.output]),
            logits_stride=4 * padded(weights.output.rows),
            **self.scratch(),
        )
