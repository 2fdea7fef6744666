"""The learned rows of positions on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.positions import PositionEmbeddingSpec, PositionEmbeddingWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import add_position_rows_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "positions"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DevicePositions:
    """The rows (positions, hidden_size) float32 on the device."""

    rows: Tensor
    inputs: Sequence[DeviceMatrix] = ()
    outputs: Sequence[DeviceMatrix] = ()


def take(
    builder: DeviceBuilder,
    spec: PositionEmbeddingSpec,
    w: PositionEmbeddingWeights,
    shards: Sequence[Shard] = (),
) -> DevicePositions:
    """Allocate the rows."""
    rows = builder.vector(w.rows.decoded().reshape(-1))
    assert rows is not None
    return DevicePositions(rows.view(w.rows.rows, w.rows.columns))


def take_state(arena: Arena, spec: PositionEmbeddingSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DevicePositions) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """It needs no buffers."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        return


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """x += the rows of the tokens' positions."""
    x, rows = step.workspace.x, block.weights.rows
    step.launches.launch(
        add_position_rows_kernel, (tokens,), x, rows, step.workspace.state, **_constants(rows), IN_STEP=True,
        warps=warps_for(x.shape[1]),
    )  # fmt: skip
    return step.add(number, None, 0.0, tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the rows of a chunk's positions."""
    rows, (tokens, width) = block.weights.rows, chunk.x.shape
    add_position_rows_kernel[(tokens,)](
        chunk.x, rows, chunk.words, **_constants(rows), IN_STEP=False, DEPENDENT=False,
        num_warps=warps_for(width),
    )  # fmt: skip
    prompt.apply_next_norm(chunk, number)


def _constants(rows: Tensor) -> dict[str, int]:
    positions, width = rows.shape
    return {"WIDTH": width, "BLOCK": next_power_of_two(width), "POSITIONS": positions}
