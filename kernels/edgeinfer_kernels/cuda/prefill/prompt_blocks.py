"""The blocks of a prefill: those on the device, or all of a split model, with the CPU's weights streamed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.weights.device_block import DeviceNorms
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.moe_weights import ExpertStacks
from edgeinfer_kernels.decoder import BlockIndex, ResidualBlock


@dataclass(frozen=True)
class PromptBlock:
    """One block of a prefill. `index`: in the whole decoder.

    `parts`: the weights; of a split feed-forward those on the device and those of the CPU, empty if a CPU
    stage computes it. `state` None: it is on the host, or the block has none. `streamed_experts`: the CPU's
    experts of an MoE block.
    """

    index: BlockIndex
    residual: ResidualBlock[Any]
    parts: tuple[Any, ...]
    norms: DeviceNorms
    state: Any = None
    streamed_experts: ExpertStacks | None = None

    @cached_property
    def module(self) -> Any:
        """The module of the block's kind."""
        return device_module(self.residual.block.kind)

    @property
    def weights(self) -> Any:
        """The only part."""
        (part,) = self.parts
        return part


def device_blocks(model: DeviceModel) -> list[PromptBlock]:
    """The blocks on the device, with its weights only."""
    return [
        PromptBlock(
            block.index,
            block.residual,
            (block.weights,) if block.has_granules else (),
            block.norms,
            block.state,
        )
        for block in model.blocks
    ]
