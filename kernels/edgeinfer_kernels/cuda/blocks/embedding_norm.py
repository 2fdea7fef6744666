"""The norm of the embedding on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding_norm import EmbeddingNormSpec, EmbeddingNormWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NORMS, norm_in_place_kernel
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

PART = "embedding norm"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceEmbeddingNorm:
    """The weight and the bias, if there is one, of the norm on the device; it has no matrix."""

    weight: Tensor | None
    bias: Tensor | None
    inputs: Sequence[DeviceMatrix] = ()
    outputs: Sequence[DeviceMatrix] = ()


def take(
    builder: DeviceBuilder, spec: EmbeddingNormSpec, w: EmbeddingNormWeights, shards: Sequence[Shard] = ()
) -> DeviceEmbeddingNorm:
    """Allocate the vectors."""
    return DeviceEmbeddingNorm(builder.vector(w.weight), builder.vector(w.bias))


def take_state(arena: Arena, spec: EmbeddingNormSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceEmbeddingNorm) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """It needs no buffers."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        return


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """x = norm(x) of a decode step."""
    x, args = step.workspace.x, _norm_args(block.residual.block.norm, block.weights)
    constants = _constants(block.residual.block.norm, block.weights, x.shape[1])
    step.launches.launch(norm_in_place_kernel, (tokens,), x, args, warps=warps_for(x.shape[1]), **constants)
    return step.add(number, None, 0.0, tokens)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x = norm(x) of a chunk."""
    norm, (tokens, width) = block.residual.block.norm, chunk.x.shape
    norm_in_place_kernel[(tokens,)](
        chunk.x, _norm_args(norm, block.weights),
        **_constants(norm, block.weights, width), DEPENDENT=False, num_warps=warps_for(width),
    )  # fmt: skip
    prompt.apply_next_norm(chunk, number)


def _norm_args(norm: NormSpec, w: DeviceEmbeddingNorm) -> NormArgs:
    return NormArgs(w.weight, w.bias, norm.epsilon)


def _constants(norm: NormSpec, w: DeviceEmbeddingNorm, width: int) -> dict[str, int]:
    return {
        "WIDTH": width,
        "BLOCK": next_power_of_two(width),
        "NORM": int(NORMS[norm.kind]),
        "BIAS": w.bias is not None,
    }
