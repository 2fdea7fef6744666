"""Keys and values of a target's states on a GPU, in the cache of a block drafter's layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.embedding.draft_keys import DraftKeysSpec, DraftKeysWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.attention import append_chunk, attention_config, cache_args, rope_args
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.step_rope import append_keys_kernel
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "draft keys"
"""The name of the weights in lists of device memory."""
WARPS = 4


@dataclass(frozen=True)
class DeviceDraftKeys:
    """No matrices besides those of the attention block."""

    inputs: Sequence[DeviceMatrix] = ()
    outputs: Sequence[DeviceMatrix] = ()


def take(
    builder: DeviceBuilder, spec: DraftKeysSpec, w: DraftKeysWeights, shards: Sequence[Shard] = ()
) -> DeviceDraftKeys:
    """Nothing is allocated."""
    return DeviceDraftKeys()


def take_state(arena: Arena, spec: DraftKeysSpec, positions: int, kind: CacheType) -> None:
    """The state is that of the attention block."""
    return


def inactive_bytes(w: DeviceDraftKeys) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """No buffers besides those of attention."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        return


def _attention(model: DeviceModel, spec: DraftKeysSpec) -> DeviceBlock:
    """The attention block whose cache is written."""
    return next(block for block in model.blocks if block.index == BlockIndex(spec.layer, 0))


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """Append the keys and values of a step's tokens, which don't attend to anything. The matrix of queries is
    stacked with those of keys and values, and is multiplied too.
    """
    attention = _attention(step.model, block.residual.block)
    spec, w, cache = attention.residual.block, attention.weights, attention.state
    space, pages = step.space("attention"), step.pages
    step.launches.stacked(w.qkv, source, space.qkv, w.qkv_bias, tokens)
    step.launches.launch(
        append_keys_kernel,
        (spec.kv_heads,),
        space.qkv,
        space.qkv.shape[1],
        cache_args(cache, pages),
        step.workspace.state,
        rope_args(step, spec, w),
        ATTENTION=attention_config(spec, cache, has_sinks=False, is_paged=pages is not None),
        TOKENS=tokens,
        warps=WARPS,
    )
    return source


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, of a chunk."""
    attention = _attention(prompt.model, block.residual.block)
    append_chunk(prompt, chunk, attention.residual.block, attention.weights, attention.state, chunk.h)
