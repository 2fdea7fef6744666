"""The time mixing of RWKV-7 on a GPU: weights, buffers, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.rwkv7_time_mix import MIXED, Rwkv7TimeMixSpec, Rwkv7TimeMixWeights
from edgeinfer_kernels.cuda.blocks.common.convolution_block import (
    add_product,
    inactive_bytes,
    project_back,
    take_state,
    take_vectors,
)
from edgeinfer_kernels.cuda.blocks.rwkv7_channel_mix import config_of, shift_chunk, shift_step
from edgeinfer_kernels.cuda.cache.recurrent_states import (
    HostStates,
    keep_chunk_rows,
    keep_step_rows,
    state_args,
    state_config,
    step_config,
)
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, scale_rows
from edgeinfer_kernels.cuda.triton_ops.recurrent.rwkv7 import (
    CHUNK,
    HeadVectors,
    LowRanks,
    MixVectors,
    finish_heads_kernel,
    low_rank_step_kernel,
    prepare_heads_kernel,
    time_mix_chunk_kernel,
    time_mix_step_kernel,
)
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

__all__ = ["HostStates", "Space", "decode", "inactive_bytes", "prefill", "take", "take_state"]
PART = "time mixing"
"""The name of the weights in lists of device memory."""
NORMALIZES_INPUT = True
STEP_COLUMNS, CHUNK_COLUMNS = 16, 32
"""Columns of the state that a program of a decode step and of a chunk updates."""
LOW = "wavg"
"""The inputs with low-rank products."""
PARTS = {"w": 1, "k": 2, "v": 3, "a": 5}
"""The parts of a row of the state to which products go."""

Pair = tuple[DeviceMatrix, DeviceMatrix]


@dataclass(frozen=True)
class DeviceTimeMix:
    """The weights of a time mixing on the device; `low`: the two matrices of each of `LOW`, None if the first
    layer has none.
    """

    receptance: DeviceMatrix
    key: DeviceMatrix
    value: DeviceMatrix
    low: tuple[Pair | None, ...]
    output: DeviceMatrix
    lerp: Tensor
    mix: MixVectors
    heads: HeadVectors

    @property
    def pairs(self) -> dict[str, Pair]:
        """The low-rank products by their input."""
        return {name: pair for name, pair in zip(LOW, self.low, strict=True) if pair is not None}

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.receptance, self.key, self.value, *(first for first, _ in self.pairs.values())]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]


def take(
    builder: DeviceBuilder, spec: Rwkv7TimeMixSpec, w: Rwkv7TimeMixWeights, shards: Sequence[Shard] = ()
) -> DeviceTimeMix:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""

    def pair(first: Matrix | None, second: Matrix | None) -> Pair | None:
        return None if first is None or second is None else (builder.matrix(first), builder.matrix(second))

    lerp, *vectors = take_vectors(builder, w.lerp, w.w0, w.a0, w.v0, w.k_k, w.k_a, w.r_k, w.norm, w.norm_bias)
    return DeviceTimeMix(
        receptance=builder.matrix(w.receptance),
        key=builder.matrix(w.key),
        value=builder.matrix(w.value),
        low=(pair(w.w1, w.w2), pair(w.a1, w.a2), pair(w.v1, w.v2), pair(w.g1, w.g2)),
        output=builder.matrix(w.output),
        lerp=lerp,
        mix=MixVectors(*vectors[:5]),
        heads=HeadVectors(*vectors[5:]),
    )


class _Rows:
    """Rows of the state; r, the products with V₂ and G₂, the results of the heads, and v of the first layer,
    for `tokens` tokens of all blocks.
    """

    def __init__(self, spec: Rwkv7TimeMixSpec, arena: Arena, tokens: int) -> None:
        self.rows = arena.take((tokens, spec.recurrent.row_width), torch.float32)
        self.receptance, self.value_rates, self.gates, self.results, self.first_values = (
            arena.take((tokens, spec.width), torch.float32) for _ in range(5)
        )
        self._width = spec.width

    def target(self, name: str) -> Tensor:
        """Where the product of an input belongs: a buffer, or a part of the rows."""
        buffers = {"r": self.receptance, "g": self.gates, "v2": self.value_rates}
        return buffers[name] if name in buffers else self.rows[:, PARTS[name] * self._width :]


class Space(_Rows):
    """The buffers of a decode step, shared by all time mixings."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceTimeMix] = [block.weights for block in blocks]
        spec: Rwkv7TimeMixSpec = blocks[0].residual.block
        super().__init__(spec, arena, step.tokens)
        inputs = has_floats(*(matrix for w in weights for matrix in w.inputs))
        self.mixed = take_activations(arena, step.tokens, spec.width, inputs, len(MIXED))
        low = has_floats(*(second for w in weights for _, second in w.pairs.values()))
        self.low = [take_activations(arena, step.tokens, rank, low) for rank in spec.ranks]
        self.low_rows = arena.take((len(LOW), step.tokens, padded_rows(max(spec.ranks))), torch.float32)
        outputs = has_floats(*(w.output for w in weights))
        self.conv_out = take_activations(arena, step.tokens, spec.width, outputs)

    def input(self, name: str) -> Activations:
        """One of the interpolated inputs."""
        first = MIXED.index(name) * MAX_TOKENS
        words = self.mixed.words[first : first + MAX_TOKENS]
        return Activations(words, self.mixed.planes, self.mixed.blocks)


class PromptSpace(_Rows):
    """The buffers of a chunk of a prompt, for all time mixings."""

    def __init__(self, specs: Sequence[Rwkv7TimeMixSpec], arena: Arena, chunk: int) -> None:
        spec, count = specs[0], len(MIXED) * chunk
        super().__init__(spec, arena, chunk)
        rows = arena.take((count * spec.width,), torch.float16)
        self.mixed = ScaledRows(rows, arena.take((count,), torch.float32))
        low = arena.take((chunk * max(spec.ranks),), torch.float16)
        self.low = ScaledRows(low, arena.take((chunk,), torch.float32))


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """The interpolated inputs, their products, the recurrence, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("rwkv7_time_mix")
    launches, net = step.launches, config_of(block.residual, block.norms)
    shift_step(step, block, w.lerp, space.rows, space.mixed, tokens)
    _project(step, spec, w, space, source, tokens)
    launches.launch(
        prepare_heads_kernel, (tokens, spec.heads), space.rows, space.value_rates, space.first_values, w.mix,
        NET=net, ROW=spec.recurrent.row_width, IS_FIRST=spec.is_first, warps=1,
    )  # fmt: skip
    launches.launch(
        time_mix_step_kernel, (spec.heads, spec.head_dim // STEP_COLUMNS, step.by_sequence(tokens)[1]),
        space.rows, space.receptance, step.workspace.state, state_args(block.state), space.results,
        NET=net, CONFIG=step_config(step, spec.recurrent), COLUMNS=STEP_COLUMNS, warps=4,
    )  # fmt: skip
    keep_step_rows(step, space.rows, block.state, tokens)
    launches.launch(
        finish_heads_kernel, (tokens, spec.heads),
        space.results, space.receptance, space.rows, space.gates, w.heads, spec.head_epsilon,
        NET=net, ROW=spec.recurrent.row_width, warps=1,
    )  # fmt: skip
    return project_back(step, number, block, space.results, spec.width, tokens)


def _project(
    step: "DecodeStep", spec: Rwkv7TimeMixSpec, w: DeviceTimeMix, space: Space, source: Source, tokens: int
) -> None:
    """The products of the interpolated inputs, low-rank ones in two steps."""
    launches, squares = step.launches, source.sum_squares
    for name, matrix in (("r", w.receptance), ("k", w.key), ("v", w.value)):
        read = Source(space.input(name), squares)
        launches.rows((matrix,), read, space.target(name), None, "qkv", tokens)
    for name, (first, _) in w.pairs.items():
        read, out = Source(space.input(name), squares), space.low_rows[LOW.index(name)]
        launches.rows((first,), read, out, None, "qkv", tokens)
    outs: dict[str, Any] = {
        f"{name.upper()}_OUT": each.config for name, each in zip(LOW, space.low, strict=True)
    }
    launches.launch(
        low_rank_step_kernel, (tokens, len(LOW)),
        space.low_rows, space.low_rows.shape[2], LowRanks(*(each.words for each in space.low)),
        TOKENS=MAX_TOKENS, RANKS=LowRanks(*spec.ranks), **outs, warps=1,
    )  # fmt: skip
    for name, (_, second) in w.pairs.items():
        read = Source(space.low[LOW.index(name)], squares)
        launches.rows((second,), read, space.target("v2" if name == "v" else name), None, "output", tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the time mixing of a chunk of tokens; its state is written."""
    spec, w, tokens = block.residual.block, block.weights, len(chunk.x)
    space: PromptSpace = prompt.space("rwkv7_time_mix")
    state, words = prompt.recurrent_state(chunk, block)
    net, row = config_of(block.residual, block.norms), spec.recurrent.row_width
    mixed = shift_chunk(chunk.x, block.residual, block.norms, state, words, w.lerp, space.rows, space.mixed)
    _project_chunk(prompt, w, space, dict(zip(MIXED, mixed, strict=True)), tokens)
    prepare_heads_kernel[(tokens, spec.heads)](
        space.rows, space.value_rates, space.first_values, w.mix,
        NET=net, ROW=row, IS_FIRST=spec.is_first, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    time_mix_chunk_kernel[(spec.heads, -(-spec.head_dim // CHUNK_COLUMNS))](
        space.rows, space.receptance, words, state_args(state), space.results,
        NET=net, CONFIG=state_config(spec.recurrent), COLUMNS=CHUNK_COLUMNS, COUNT=CHUNK, num_warps=8,
    )  # fmt: skip
    keep_chunk_rows(space.rows, words, state, tokens)
    prompt.put_back_state(chunk, block, state)
    finish_heads_kernel[(tokens, spec.heads)](
        space.results, space.receptance, space.rows, space.gates, w.heads, spec.head_epsilon,
        NET=net, ROW=row, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    inner = prompt.products.hidden(tokens, spec.width)
    scale_rows(space.results[:tokens], inner.rows, inner.scales)
    add_product(prompt, chunk, number, block, inner)


def _project_chunk(
    prompt: "Prefill", w: DeviceTimeMix, space: PromptSpace, mixed: dict[str, ScaledRows], tokens: int
) -> None:
    """As `_project`, for a chunk."""
    products = prompt.products

    def product(read: ScaledRows, matrix: DeviceMatrix, name: str) -> None:
        target = space.target(name)[:tokens, : matrix.shapes.rows]
        torch.mul(products.product(read.rows, matrix), read.scales[:, None], out=target)

    for name, matrix in (("r", w.receptance), ("k", w.key), ("v", w.value)):
        product(mixed[name], matrix, name)
    for name, (first, second) in w.pairs.items():
        y = products.product(mixed[name].rows, first).mul_(mixed[name].scales[:, None])
        if name in "wg":
            y = y.tanh_() if name == "w" else y.sigmoid_()
        low = ScaledRows(space.low.rows[: y.numel()].view(y.shape), space.low.scales[:tokens])
        scale_rows(y, low.rows, low.scales)
        product(low, second, "v2" if name == "v" else name)
