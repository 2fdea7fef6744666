"""The structures of each block kind's kernels, in a module of the kind's name: `build` and `UNITS`."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from edgeinfer_kernels.blocks.common.block import BlockState
from edgeinfer_kernels.cpu.block_builder import NO_OPTIONS, BlockBuilder, BlockOptions, BuiltBlock
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights


def _module(kind: str) -> Any:
    return import_module(f"{__name__}.{kind}")


def build_block(
    builder: BlockBuilder,
    residual: ResidualBlock[Any],
    weights: ResidualWeights[Any],
    state: BlockState | None,
    options: BlockOptions = NO_OPTIONS,
) -> BuiltBlock:
    """The kernels of a block."""
    built: BuiltBlock = _module(residual.block.kind).build(builder, residual, weights, state, options)
    return built


def units_of(kinds: Iterable[str]) -> list[str]:
    """The units of compiled kernels that blocks of these kinds need besides the common one."""
    return list(dict.fromkeys(unit for kind in sorted(set(kinds)) for unit in _module(kind).UNITS))
