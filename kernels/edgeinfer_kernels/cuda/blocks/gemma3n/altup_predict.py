"""AltUp before a layer on a GPU: weights, the streams of tokens, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpPredictSpec, AltUpPredictWeights, AltUpRouter
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.gemma3n.altup import (
    RouterArgs,
    StreamsConfig,
    altup_expand_kernel,
    altup_predict_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InputArgs
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "AltUp"
"""The name of the weights in lists of device memory."""
PIECE = 256
"""Columns of a program: each program of a token computes its coefficients."""


@dataclass(frozen=True)
class DeviceAltUpPredict:
    """The weights on the device. `expand`: A_1…, stacked; None after the first layer."""

    router: RouterArgs
    expand: Stack | None

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [] if self.expand is None else self.expand.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return []


def take(
    builder: DeviceBuilder, spec: AltUpPredictSpec, w: AltUpPredictWeights, shards: Sequence[Shard] = ()
) -> DeviceAltUpPredict:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    expand = builder.stack([(matrix, None) for matrix in w.expand]) if w.expand else None
    return DeviceAltUpPredict(take_router(builder, spec.norm, w.router, w.coef), expand)


def take_router(builder: DeviceBuilder, norm: NormSpec, router: AltUpRouter, coef: Vector) -> RouterArgs:
    """The router with the norm's weights and 1 / d in its gains, and the coefficients' rows."""
    width = len(router.norm)
    gains = router.weight.reshape(-1, width) * (router.norm / np.float32(width))
    return RouterArgs(builder.vector(gains.reshape(-1)), builder.vector(coef), norm.epsilon)


def take_state(arena: Arena, spec: AltUpPredictSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceAltUpPredict) -> int:
    """Bytes of weights that not every token reads."""
    return 0


def take_streams(spec: AltUpPredictSpec, arena: Arena, tokens: int) -> Tensor:
    """The streams of tokens, and P_0 in the last place; see `triton_ops/gemma3n/altup.py`."""
    return arena.take((spec.streams + 1, tokens, spec.width), torch.float32)


def streams_config(streams: Tensor) -> StreamsConfig:
    """The configuration of kernels that read streams."""
    count, width = len(streams) - 1, streams.shape[2]
    block = next_power_of_two(width)
    return StreamsConfig(count, next_power_of_two(count), width, block, min(PIECE, block))


def pieces(width: int) -> int:
    """Programs of a token."""
    return -(-width // PIECE)


class Space:
    """The buffers of a decode step for all layers: `streams`, and the products that expand x."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        rows = sum(block.weights.expand.rows for block in blocks if block.weights.expand is not None)
        self.streams = take_streams(blocks[0].residual.block, arena, step.tokens)
        self.expanded = arena.take((step.tokens, rows), torch.float32)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """The predictions of all streams; x is the first one, and the next block's input."""
    w, launches, x = block.weights, step.launches, step.workspace.x
    space = step.space("gemma3n.altup_predict")
    streams, config = space.streams, streams_config(space.streams)
    if w.expand is not None:
        launches.stacked(w.expand, source, space.expanded, None, tokens)
        launches.launch(
            altup_expand_kernel, (tokens,),
            x, space.expanded, space.expanded.stride(0), streams, streams.stride(0),
            STREAMS=config, warps=row_warps(config),
        )  # fmt: skip
    target, norm = step.target(number), step.norm_after(number)
    launches.launch(
        altup_predict_kernel, (pieces(config.width), tokens),
        streams, streams.stride(0), x, w.router, input_args(target, launches.or_nothing(norm.weight)),
        STREAMS=config, GAIN=norm.weight is not None, OUT=target.activations.config,
        warps=row_warps(config),
    )  # fmt: skip
    target.norm = None if norm.weight is None else norm.spec
    return target


def input_args(target: Source, gain: Tensor) -> InputArgs:
    """The buffers of the next block's input, whose RMS norm the consumer applies."""
    return InputArgs(target.activations.words, gain, target.sum_squares)


def row_warps(config: StreamsConfig) -> int:
    """Warps of a program that reads a row of each stream."""
    return warps_for(config.block * config.padded)


class PromptSpace:
    """The streams of a chunk of a prompt."""

    def __init__(self, specs: Sequence[AltUpPredictSpec], arena: Arena, chunk: int) -> None:
        self.streams = take_streams(specs[0], arena, chunk)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, for a chunk of tokens."""
    w, (tokens, width), x = block.weights, chunk.x.shape, chunk.x
    streams = prompt.space("gemma3n.altup_predict").streams
    config, stride = streams_config(streams), streams.stride(0)
    if w.expand is not None:
        # The length of the products is set, so their row scales don't matter.
        expanded = prompt.products.stacked(chunk.h.rows, w.expand)
        altup_expand_kernel[(tokens,)](
            x, expanded, expanded.stride(0), streams, stride,
            STREAMS=config, DEPENDENT=False, num_warps=row_warps(config),
        )  # fmt: skip
    altup_predict_kernel[pieces(width), tokens](
        streams, stride, x, w.router, InputArgs(None, None, None),
        STREAMS=config, GAIN=False, OUT=None, DEPENDENT=False, num_warps=row_warps(config),
    )  # fmt: skip
    prompt.apply_next_norm(chunk, number)
