"""A Medusa head on a GPU: a residual layer and an output matrix, whose logits are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.medusa_head import MedusaHeadSpec, MedusaHeadWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.draft.medusa_kernels import medusa_hidden_kernel
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep

PART = "Medusa head"
"""The name of the weights in lists of device memory."""
GROUPS = 64
"""Groups of sixteen columns of a program that only quantizes."""


@dataclass(frozen=True)
class DeviceMedusaHead:
    """W, b and W_out."""

    linear: DeviceMatrix
    bias: Tensor
    output: DeviceMatrix
    outputs: Sequence[DeviceMatrix] = ()

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [self.linear]


def take(
    builder: DeviceBuilder, spec: MedusaHeadSpec, w: MedusaHeadWeights, shards: Sequence[Shard] = ()
) -> DeviceMedusaHead:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    linear, bias, output = builder.matrix(w.linear), builder.vector(w.bias), builder.matrix(w.output)
    assert bias is not None
    return DeviceMedusaHead(linear, bias, output)


def take_state(arena: Arena, spec: MedusaHeadSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceMedusaHead) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The state that all heads read and a head's hidden row, as activations; the products of W; the largest
    logits of each head's programs.
    """

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        weights: list[DeviceMedusaHead] = [block.weights for block in blocks]
        floats = has_floats(*(matrix for w in weights for matrix in (w.linear, w.output)))
        self.states = take_activations(arena, 1, step.hidden_size, floats)
        self.hidden = take_activations(arena, 1, step.hidden_size, floats)
        self.products = arena.take((1, padded_rows(step.hidden_size)), torch.float32)
        programs = max(w.output.shapes.padded_rows // ROW_MULTIPLE for w in weights)
        self.best = arena.take((len(blocks), programs), torch.float32)
        self.best_ids = arena.take((len(blocks), programs), torch.int32)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """The logits of a head for one state, in row `number`; x stays as it is."""
    space, w, workspace = step.space("embedding.medusa_head"), block.weights, step.workspace
    states, width = step.model.states_of_target, step.model.spec.hidden_size
    step.launches.rows((w.linear,), source, space.products, w.bias, "down", 1)
    step.launches.launch(
        medusa_hidden_kernel,
        (-(-width // (16 * GROUPS)),),
        space.products,
        states,
        workspace.state,
        space.hidden.words,
        WIDTH=width,
        GROUPS=GROUPS,
        ROWS=len(states),
        OUT=space.hidden.config,
        warps=4,
    )
    read, logits = Source(space.hidden, source.sum_squares), workspace.logits[number:]
    step.launches.logits(w.output, read, logits, space.best[number:], space.best_ids[number:], 1)
    return source
