"""AltUp after a layer on a GPU: weights, buffers of a decode step, and the launches of decode and prefill.

x is S_0 only after the last layer: the block before the next one reads the streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.gemma3n.altup_correct import AltUpCorrectSpec, AltUpCorrectWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks import layer_output
from edgeinfer_kernels.cuda.blocks.gemma3n.altup_predict import (
    pieces,
    row_warps,
    streams_config,
    take_router,
)
from edgeinfer_kernels.cuda.decode.step_norms import Source
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import scale_rows
from edgeinfer_kernels.cuda.triton_ops.gemma3n.altup import (
    RouterArgs,
    altup_add_kernel,
    altup_correct_kernel,
    altup_merge_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "AltUp"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceAltUpCorrect:
    """The weights on the device. `merge`: U_1…, only in the last layer."""

    router: RouterArgs
    scale: Tensor | None
    merge: tuple[DeviceMatrix, ...]
    output: layer_output.DeviceLayerOutput

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [*self.merge, *self.output.inputs]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return self.output.outputs


def take(
    builder: DeviceBuilder, spec: AltUpCorrectSpec, w: AltUpCorrectWeights, shards: Sequence[Shard] = ()
) -> DeviceAltUpCorrect:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    return DeviceAltUpCorrect(
        take_router(builder, spec.norm, w.router, w.coef),
        builder.vector(w.scale),
        tuple(map(builder.matrix, w.merge)),
        layer_output.take(builder, spec.output, w.output),
    )


def take_state(arena: Arena, spec: AltUpCorrectSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceAltUpCorrect) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space(layer_output.InputSpace):
    """The buffers of a decode step: those of the per-layer inputs; S_1… as activations and their products."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        outputs = [matrix for block in blocks for matrix in block.weights.outputs]
        super().__init__([block.residual.block.output for block in blocks], outputs, arena, step.tokens)
        merge = [matrix for block in blocks for matrix in block.weights.merge]
        rows = sum(matrix.shapes.padded_rows for matrix in merge)
        self._streams = take_activations(
            arena, step.tokens, step.hidden_size, has_floats(*merge), rows_per_token=len(merge)
        )
        self.merged = arena.take((step.tokens, rows), torch.float32)
        self._tokens = step.tokens

    @property
    def streams(self) -> Activations:
        """S_1… of all tokens, (streams · tokens, …)."""
        return self._streams

    def stream(self, index: int) -> Activations:
        """The activations of stream `index` + 1."""
        words = self._streams.words[index * self._tokens : (index + 1) * self._tokens]
        return Activations(words, self._streams.planes, self._streams.blocks)


def before_layer_decode(step: "DecodeStep", block: DeviceBlock, tokens: int) -> None:
    """Before the first layer: project x to the per-layer inputs of all layers."""
    space, spec = step.space("gemma3n.altup_correct"), block.residual.block
    layer_output.project_hidden(step, space, spec.output, block.weights.output, tokens)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """Correct the streams and add the projected per-layer input; the last layer merges them to x."""
    spec, w, launches, workspace = block.residual.block, block.weights, step.launches, step.workspace
    streams, space = step.space("gemma3n.altup_predict").streams, step.space("gemma3n.altup_correct")
    config, stride, y = streams_config(streams), streams.stride(0), workspace.y
    grid, warps = (pieces(config.width), tokens), row_warps(config)
    gate = Source(source.activations, source.sum_squares)
    launches.launch(
        altup_correct_kernel, grid,
        streams, stride, workspace.x, w.router, w.scale, gate.activations.words,
        STREAMS=config, OUT=gate.activations.config, warps=warps,
    )  # fmt: skip
    layer_output.project_input(step, space, spec.output, w.output, gate, tokens)
    launches.launch(
        altup_add_kernel, grid,
        y, y.stride(0), workspace.nothing, streams, stride, _post_norm(spec, w),
        STREAMS=config, SCALED=False, warps=warps,
    )  # fmt: skip
    if not w.merge:
        return step.target(number)  # The next block reads the streams only.
    launches.norms.quantize(streams[1], config.width, space.streams, len(w.merge) * streams.shape[1])
    for index, matrix in enumerate(w.merge):
        product = space.merged[:, index * config.width :]
        stream = Source(space.stream(index), source.sum_squares)
        launches.rows((matrix,), stream, product, None, "output", tokens)
    launches.launch(
        altup_merge_kernel, (tokens,),
        streams, space.merged, space.merged.stride(0), workspace.x, STREAMS=config, warps=warps,
    )  # fmt: skip
    return step.add(number, None, 0.0, tokens)


class PromptSpace(layer_output.PromptSpace):
    """The per-layer inputs of a chunk of a prompt."""

    def __init__(self, specs: Sequence[AltUpCorrectSpec], arena: Arena, chunk: int) -> None:
        super().__init__([spec.output for spec in specs], arena, chunk)


def before_layer_prefill(prompt: "Prefill", chunk: "Chunk", block: "PromptBlock") -> None:
    """Before the first layer: compute the per-layer inputs of all layers from x."""
    space, spec = prompt.space("gemma3n.altup_correct"), block.residual.block
    layer_output.compute_chunk_inputs(prompt, chunk, space, spec.output, block.weights.output)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """As `decode`, for a chunk of tokens."""
    spec, w, (tokens, width) = block.residual.block, block.weights, chunk.x.shape
    streams = prompt.space("gemma3n.altup_predict").streams
    config, stride, gate = streams_config(streams), streams.stride(0), prompt.products.floats(tokens, width)
    grid, options = (pieces(width), tokens), {"DEPENDENT": False, "num_warps": row_warps(config)}
    altup_correct_kernel[grid](
        streams, stride, chunk.x, w.router, w.scale, gate, STREAMS=config, OUT=None, **options
    )
    scale_rows(gate, chunk.h.rows, chunk.h.scales)
    space = prompt.space("gemma3n.altup_correct")
    y, scales = layer_output.project_chunk_input(prompt, space, spec.output, w.output, chunk.h)
    altup_add_kernel[grid](
        y, y.stride(0), scales, streams, stride, _post_norm(spec, w), STREAMS=config, SCALED=True, **options
    )
    if w.merge:
        merged, rows = prompt.products.floats(tokens, len(w.merge) * width), prompt.products.hidden
        for index, matrix in enumerate(w.merge):
            # The length of the products is set, so their row scales don't matter.
            hidden = rows(tokens, width)
            scale_rows(streams[index + 1, :tokens], hidden.rows, hidden.scales)
            product = merged[:, index * width : (index + 1) * width]
            prompt.products.multiply(hidden.rows, matrix, product)
        altup_merge_kernel[(tokens,)](streams, merged, merged.stride(0), chunk.x, STREAMS=config, **options)
    prompt.apply_next_norm(chunk, number)


def _post_norm(spec: AltUpCorrectSpec, w: DeviceAltUpCorrect) -> NormArgs:
    return NormArgs(w.output.post_norm, w.output.post_norm, spec.output.norm.epsilon)
