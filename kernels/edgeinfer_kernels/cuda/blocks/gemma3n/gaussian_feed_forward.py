"""A feed-forward of which few neurons are active on a GPU: weights, buffers of a decode step, and the
launches of decode and prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.gemma3n.gaussian_feed_forward import (
    GaussianFeedForwardSpec,
    GaussianFeedForwardWeights,
)
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.gemma3n.gaussian_feed_forward import (
    gaussian_hidden_kernel,
    gaussian_rows_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "gaussian feed-forward"
"""The name of the weights in lists of device memory."""
STEP_PIECE, PROMPT_PIECE = 1024, 2048
"""Neurons of a program in a step, each of which computes the threshold; and at a time in a prompt."""
WARPS = 8


@dataclass(frozen=True)
class DeviceGaussianFeedForward:
    """The weights on the device."""

    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.gate, self.up]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.down]


def take(
    builder: DeviceBuilder,
    spec: GaussianFeedForwardSpec,
    w: GaussianFeedForwardWeights,
    shards: Sequence[Shard] = (),
) -> DeviceGaussianFeedForward:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    return DeviceGaussianFeedForward(*map(builder.matrix, w.matrices()))


def take_state(arena: Arena, spec: GaussianFeedForwardSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceGaussianFeedForward) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step for all layers: the products of gate and up, and the hidden rows."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        neurons = max(block.weights.up.shapes.rows for block in blocks)
        self.products = arena.take((step.tokens, 2 * padded_rows(neurons)), torch.float32)
        floats = has_floats(*(block.weights.down for block in blocks))
        self.hidden = take_activations(arena, step.tokens, neurons, floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """Gate and up, the hidden rows of active neurons, then down."""
    spec, w, launches = block.residual.block, block.weights, step.launches
    space, neurons = step.space("gemma3n.gaussian_feed_forward"), w.up.shapes.rows
    launches.rows((w.gate, w.up), source, space.products, None, "qkv", tokens)
    hidden = space.hidden.of_blocks(w.down.shapes.blocks)
    launches.launch(
        gaussian_hidden_kernel, (-(-neurons // STEP_PIECE), tokens),
        space.products, space.products[:, w.gate.shapes.padded_rows :], space.products.stride(0),
        spec.deviations, hidden.words, **_shape(spec, neurons, STEP_PIECE), OUT=hidden.config, warps=WARPS,
    )  # fmt: skip
    return step.close_block(number, w.down, None, hidden, "down", tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, for a chunk of tokens."""
    spec, w, products = block.residual.block, block.weights, prompt.products
    tokens, neurons = len(chunk.x), w.up.shapes.rows
    gate, up = products.floats(2, tokens, neurons)
    products.multiply(chunk.h.rows, w.gate, gate)
    products.multiply(chunk.h.rows, w.up, up)
    hidden = products.hidden(tokens, neurons)
    gaussian_rows_kernel[(tokens,)](
        gate, up, chunk.h.scales, spec.deviations, hidden.rows, hidden.scales,
        **_shape(spec, neurons, PROMPT_PIECE), num_warps=WARPS,
    )  # fmt: skip
    prompt.add(chunk, number, products.product(hidden.rows, w.down), None, hidden.scales)


def _shape(spec: GaussianFeedForwardSpec, neurons: int, piece: int) -> dict[str, Any]:
    block = next_power_of_two(neurons)
    return {
        "NEURONS": neurons,
        "BLOCK": block,
        "PIECE": min(piece, block),
        "ACTIVATION": activation_code(spec.activation),
    }
