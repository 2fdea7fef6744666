"""Attention of an encoder on a GPU: weights, the texts of a step, and the launches for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.encoder_attention import (
    TILE_WORDS,
    EncoderAttentionSpec,
    EncoderAttentionWeights,
    text_bounds,
)
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks import attention
from edgeinfer_kernels.cuda.blocks.attention import DeviceAttention
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.prefill.text_attention import (
    ProjectedTexts,
    add_position_rows,
    text_attention,
    tile_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "attention"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceEncoderAttention:
    """The weights of attention, and the slopes of ALiBi."""

    attention: DeviceAttention
    slopes: Tensor | None

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.attention.inputs

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return self.attention.outputs


def take(
    builder: DeviceBuilder,
    spec: EncoderAttentionSpec,
    w: EncoderAttentionWeights,
    shards: Sequence[Shard] = (),
) -> DeviceEncoderAttention:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    weights = attention.take(builder, spec.projections, w.attention, shards)
    return DeviceEncoderAttention(weights, builder.vector(spec.slopes() if spec.alibi else None))


def take_state(arena: Arena, spec: EncoderAttentionSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def oldest_capability(spec: EncoderAttentionSpec) -> int:
    """Ten times the compute capability: on older GPUs a tile of scores exceeds the registers."""
    return 80


def inactive_bytes(w: DeviceEncoderAttention) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """There are no decode steps, so no buffers."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        return


class PromptSpace:
    """The texts of a step, and the buffers for all blocks: queries, keys, values and results of the heads.

    A text is divided into tiles of `tile_tokens`, whose tokens attend to the same text.
    """

    def __init__(self, specs: Sequence[EncoderAttentionSpec], arena: Arena, chunk: int) -> None:
        columns = max(spec.heads * spec.head_dim for spec in specs)
        cached = max(spec.kv_heads * spec.head_dim for spec in specs)
        self.chunk = chunk
        self.queries, self.attn_out = (arena.take((chunk * columns,), torch.float16) for _ in range(2))
        self.keys, self.values = (arena.take((chunk * cached,), torch.float16) for _ in range(2))
        self.positions = arena.take((chunk,), torch.int32)
        self._tiles = arena.take((chunk, TILE_WORDS), torch.int32)
        self._tile_tokens = min(map(tile_tokens, specs))
        self._tile_count = 0

    @property
    def tiles(self) -> Tensor:
        """(count, 3) int32: the first token of each tile, and the bounds of its text."""
        return self._tiles[: self._tile_count]

    def send(self, lengths: Sequence[int]) -> None:
        """Send the positions and the tiles of texts of these lengths, one after another."""
        bounds = text_bounds(np.asarray(lengths, np.int64))
        positions = np.arange(len(bounds)) - bounds[:, 0]
        tiles = _tiles(bounds, positions, self._tile_tokens)
        self._tile_count = len(tiles)
        self.positions[: len(positions)].copy_(torch.from_numpy(positions.astype(np.int32)))
        self._tiles[: len(tiles)].copy_(torch.from_numpy(tiles))

    def add_position_rows(self, x: Tensor, rows: Tensor) -> None:
        """x (tokens, width) += the rows of the tokens' positions; later positions have the last row."""
        last = len(rows) // x.shape[1] - 1
        add_position_rows(x, rows, self.positions[: len(x)].clamp(max=last))


def _tiles(
    bounds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], tokens: int
) -> npt.NDArray[np.int32]:
    """(count, 3): the first token of each tile, and the bounds of its text."""
    firsts = np.flatnonzero(positions % tokens == 0)
    return np.column_stack([firsts, bounds[firsts]]).astype(np.int32)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += attention of texts."""
    spec, w, h = block.residual.block, block.weights.attention, chunk.h
    space, tokens, columns = prompt.space("encoder_attention"), len(chunk.x), spec.heads * spec.head_dim
    queries = space.queries[: tokens * columns].view(tokens, spec.heads, spec.head_dim)
    keys, values = (
        held[: spec.kv_heads * space.chunk * spec.head_dim].view(spec.kv_heads, space.chunk, spec.head_dim)
        for held in (space.keys, space.values)
    )
    qkv = prompt.products.stacked(h.rows, w.qkv)
    heads = ProjectedHeads(qkv, h.scales, w.qkv_bias, w.q_norm, w.k_norm)
    cache = CacheArgs(keys, None, values, None, space.chunk)
    rope_append(heads, w.table, spec.projections, chunk.words, queries, cache, positions=space.positions)
    attn_out = space.attn_out[: tokens * columns].view(tokens, columns)
    text_attention(ProjectedTexts(queries, keys, values), space.tiles, spec, block.weights.slopes, attn_out)
    y = prompt.products.product(attn_out, w.output)
    prompt.add(chunk, number, y, w.output_bias)
