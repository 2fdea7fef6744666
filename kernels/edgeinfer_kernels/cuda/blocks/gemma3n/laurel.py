"""Laurel on a GPU: weights, buffers of a decode step, and the launches of decode and prefill.

Attention's normed input h is computed again, in float32, from x before attention: AltUp's prediction P_0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.gemma3n.laurel import SUM_SCALE, LaurelSpec, LaurelWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.gemma3n.altup_predict import PIECE, input_args, pieces
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import scale_rows
from edgeinfer_kernels.cuda.triton_ops.gemma3n.rows import laurel_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import InputArgs, NormArgs
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

PART = "Laurel"
"""The name of the weights in lists of device memory."""
WARPS = 4
"""Warps of a program, which reads two rows."""


@dataclass(frozen=True)
class DeviceLaurel:
    """L, R and the weights of the norm on the device."""

    left: DeviceMatrix
    right: DeviceMatrix
    post_norm: Tensor | None

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.left]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.right]


def take(
    builder: DeviceBuilder, spec: LaurelSpec, w: LaurelWeights, shards: Sequence[Shard] = ()
) -> DeviceLaurel:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    return DeviceLaurel(builder.matrix(w.left), builder.matrix(w.right), builder.vector(w.post_norm))


def take_state(arena: Arena, spec: LaurelSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceLaurel) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step for all layers: the products with L, in float32 and as activations."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        rank = max(block.weights.left.shapes.rows for block in blocks)
        self.products = arena.take((step.tokens, padded_rows(rank)), torch.float32)
        floats = has_floats(*(block.weights.right for block in blocks))
        self.hidden = take_activations(arena, step.tokens, rank, floats)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """x = (x + h + norm(R · L · h)) / √2."""
    w, launches, workspace = block.weights, step.launches, step.workspace
    space, y = step.space("gemma3n.laurel"), workspace.y
    launches.rows((w.left,), source, space.products, None, "qkv", tokens)
    products = space.products
    launches.norms.quantize(products, w.left.shapes.rows, space.hidden, tokens, products.stride(0))
    launches.rows((w.right,), Source(space.hidden, source.sum_squares), y, None, "output", tokens)
    attention = step.model.blocks[number - 1]
    before = step.space("gemma3n.altup_predict").streams[-1]
    target, norm, width = step.target(number), step.norm_after(number), workspace.x.shape[1]
    launches.launch(
        laurel_kernel, (pieces(width), tokens),
        workspace.x, before, _norm_of(attention), y, y.stride(0), workspace.nothing, _post_norm(block),
        SUM_SCALE, input_args(target, launches.or_nothing(norm.weight)),
        **_shape(width), SCALED=False, GAIN=norm.weight is not None, OUT=target.activations.config,
        warps=WARPS,
    )  # fmt: skip
    target.norm = None if norm.weight is None else norm.spec
    return target


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, for a chunk of tokens."""
    w, (tokens, width) = block.weights, chunk.x.shape
    left = prompt.products.product(chunk.h.rows, w.left)
    hidden = prompt.products.hidden(tokens, w.left.shapes.rows)
    scale_rows(left, hidden.rows, hidden.scales)
    hidden.scales.mul_(chunk.h.scales)
    y = prompt.products.product(hidden.rows, w.right)
    before = prompt.space("gemma3n.altup_predict").streams[-1]
    laurel_kernel[pieces(width), tokens](
        chunk.x, before, _norm_of(chunk.blocks[number - 1]), y, y.stride(0), hidden.scales,
        _post_norm(block), SUM_SCALE, InputArgs(None, None, None),
        **_shape(width), SCALED=True, GAIN=False, OUT=None, DEPENDENT=False, num_warps=WARPS,
    )  # fmt: skip
    prompt.apply_next_norm(chunk, number)


def _norm_of(attention: "DeviceBlock | PromptBlock") -> NormArgs:
    """The norm before attention, the block before this one."""
    weight = attention.norms.norm
    return NormArgs(weight, weight, attention.residual.norm.epsilon)


def _post_norm(block: "DeviceBlock | PromptBlock") -> NormArgs:
    weight = block.weights.post_norm
    return NormArgs(weight, weight, block.residual.block.norm.epsilon)


def _shape(width: int) -> dict[str, Any]:
    block = next_power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "PIECE": min(PIECE, block)}
