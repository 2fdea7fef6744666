"""The end of a layer on a GPU: its scale and its per-layer input."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.layer_output import LayerOutputSpec, LayerOutputWeights
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, scale_rows, warps_for
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.layer_output_kernels import (
    AWAITED,
    SENT,
    TABLE,
    finish_layer_kernel,
    gate_inputs_kernel,
    per_layer_inputs_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.per_layer_rows import PerLayerSpace
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

PART = "layer output"
"""The name of the weights in lists of device memory."""


@dataclass(frozen=True)
class DeviceLayerOutput:
    """The weights on the device; None where the layer has no such weight."""

    scale: float
    inp_gate: DeviceMatrix | None
    proj: DeviceMatrix | None
    post_norm: Tensor | None
    model_proj: DeviceMatrix | None
    proj_norm: Tensor | None

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return [each for each in (self.inp_gate, self.model_proj) if each is not None]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [] if self.proj is None else [self.proj]


def take(
    builder: DeviceBuilder, spec: LayerOutputSpec, w: LayerOutputWeights, shards: Sequence[Shard] = ()
) -> DeviceLayerOutput:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""

    def matrix(source: Matrix | None) -> DeviceMatrix | None:
        return None if source is None else builder.matrix(source)

    return DeviceLayerOutput(
        w.scale, matrix(w.inp_gate), matrix(w.proj), builder.vector(w.post_norm),
        matrix(w.model_proj), builder.vector(w.proj_norm),
    )  # fmt: skip


def take_state(arena: Arena, spec: LayerOutputSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def inactive_bytes(w: DeviceLayerOutput) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class InputSpace(PerLayerSpace):
    """The buffers of a decode step, shared by all layers."""

    def __init__(
        self, specs: Sequence[LayerOutputSpec], outputs: Sequence[DeviceMatrix], arena: Arena, tokens: int
    ) -> None:
        width, columns = max(spec.width for spec in specs), max(spec.columns for spec in specs)
        self.hidden = take_activations(arena, tokens, width, has_floats(*outputs))
        self.gate = arena.take((tokens, padded_rows(width)), torch.float32)
        self.projected = arena.take((tokens, padded_rows(columns)), torch.float32)
        self.rows_per_chunk = tokens
        self.numbers = arena.take((3,), torch.int64)
        self.inputs = arena.take((tokens, columns), torch.float32)


class Space(InputSpace):
    """The buffers of a decode step."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        outputs = [matrix for block in blocks for matrix in block.weights.outputs]
        super().__init__([block.residual.block for block in blocks], outputs, arena, step.tokens)


def before_layer_decode(step: "DecodeStep", block: DeviceBlock, tokens: int) -> None:
    """Before the first layer: project x to the per-layer inputs of all layers."""
    project_hidden(step, step.space("layer_output"), block.residual.block, block.weights, tokens)


def project_hidden(
    step: "DecodeStep", space: InputSpace, spec: LayerOutputSpec, w: DeviceLayerOutput, tokens: int
) -> None:
    """Project x to the per-layer inputs of all layers, if `w` are the weights of the first layer.

    The per-layer embeddings are added at the end of that layer: until then the host may still send them.
    """
    launches, workspace = step.launches, step.workspace
    if w.model_proj is None:
        return
    read = workspace.normed_input[1]  # The first layer's input is in the other one.
    launches.norms.add_norm(None, None, 0.0, NextNorm(spec.norm, None, None), read, tokens)
    source = Source(read, workspace.sum_squares[1])
    launches.rows((w.model_proj,), source, space.projected, None, "output", tokens)


def _add_embeddings(
    step: "DecodeStep", space: InputSpace, spec: LayerOutputSpec, w: DeviceLayerOutput, tokens: int
) -> None:
    """Compute the per-layer inputs of all layers from the projected hidden states and the embeddings."""
    launches, workspace = step.launches, step.workspace
    launches.launch(
        per_layer_inputs_kernel, (spec.layers, tokens),
        space.projected, space.projected.stride(0), workspace.nothing, space.rows, workspace.state,
        space.numbers, _norm_args(spec, w), space.inputs, 1 / sqrt(workspace.x.shape[1]), sqrt(spec.width),
        **_shape(spec.width), RAW=space.raw, SCALED=False, ROWS=TABLE if space.has_table else AWAITED,
        warps=1,
    )  # fmt: skip


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """x = scale · (x + the norm of the gated per-layer input, projected back)."""
    spec, w, launches, y = block.residual.block, block.weights, step.launches, None
    if w.inp_gate is not None:
        project_input(step, step.space("layer_output"), spec, w, source, tokens)
        y = step.workspace.y
    target, post_norm = step.target(number), NextNorm(spec.norm, w.post_norm, None)
    launches.norms.add_norm(y, post_norm, 1.0, step.norm_after(number), target.activations, tokens, w.scale)
    return target


def project_input(
    step: "DecodeStep", space: InputSpace, spec: LayerOutputSpec, w: Any, source: Source, tokens: int
) -> None:
    """Set y to the layer's per-layer input, gated by the activations of `source` and projected back."""
    if w.model_proj is not None:
        _add_embeddings(step, space, spec, w, tokens)
    launches = step.launches
    inputs = space.inputs[:, spec.layer * spec.width :]
    launches.rows((w.inp_gate,), source, space.gate, None, "output", tokens)
    launches.launch(
        gate_inputs_kernel, (tokens,),
        space.gate, space.gate.stride(0), launches.workspace.nothing, inputs, inputs.stride(0),
        space.hidden.words, **_shape(spec.width), ACTIVATION=activation_code(spec.activation), SCALED=False,
        OUT=space.hidden.config, warps=1,
    )  # fmt: skip
    hidden = Source(space.hidden, source.sum_squares)
    launches.rows((w.proj,), hidden, step.workspace.y, None, "down", tokens)


class PromptSpace(PerLayerSpace):
    """The per-layer inputs of a chunk of a prompt."""

    def __init__(self, specs: Sequence[LayerOutputSpec], arena: Arena, chunk: int) -> None:
        columns = max(spec.columns for spec in specs)
        self.rows_per_chunk = chunk
        self.inputs = arena.take((chunk, columns), torch.float32)


def before_layer_prefill(prompt: "Prefill", chunk: "Chunk", block: "PromptBlock") -> None:
    """Before the first layer: compute the per-layer inputs of all layers from x."""
    space = prompt.space("layer_output")
    compute_chunk_inputs(prompt, chunk, space, block.residual.block, block.weights)


def compute_chunk_inputs(
    prompt: "Prefill", chunk: "Chunk", space: PromptSpace, spec: LayerOutputSpec, w: DeviceLayerOutput
) -> None:
    """Compute the per-layer inputs of a chunk for all layers from x, if `w` are the weights of the first
    layer.
    """
    if w.model_proj is None:
        return
    tokens, width = chunk.x.shape
    scale_rows(chunk.x, chunk.h.rows, chunk.h.scales)
    projected = prompt.products.product(chunk.h.rows, w.model_proj)
    per_layer_inputs_kernel[(spec.layers, tokens)](
        projected, projected.stride(0), chunk.h.scales, space.rows, prompt.ids, None, _norm_args(spec, w),
        space.inputs, 1 / sqrt(width), sqrt(spec.width), **_shape(spec.width), RAW=space.raw, SCALED=True,
        ROWS=TABLE if space.has_table else SENT, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    prompt.apply_next_norm(chunk, -1)  # The rows of the first layer's input were overwritten.


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x = scale · (x + the norm of the gated per-layer input, projected back) for a chunk of tokens."""
    spec, w, (tokens, width) = block.residual.block, block.weights, chunk.x.shape
    y, scales = chunk.x, None
    if w.inp_gate is not None:
        y, scales = project_chunk_input(prompt, prompt.space("layer_output"), spec, w, chunk.h)
    finish_layer_kernel[(tokens,)](
        chunk.x, y, y.stride(0), scales, NormArgs(w.post_norm, None, spec.norm.epsilon), w.scale,
        **_shape(width), ADDS=scales is not None, DEPENDENT=False, num_warps=warps_for(width),
    )  # fmt: skip
    prompt.apply_next_norm(chunk, number)


def project_chunk_input(
    prompt: "Prefill", space: PromptSpace, spec: LayerOutputSpec, w: Any, h: ScaledRows
) -> tuple[Tensor, Tensor]:
    """The layer's per-layer input of a chunk, gated by h and projected back, and the row scales that remain
    to be multiplied. Both are overwritten by the next matmul.
    """
    inputs, tokens = space.inputs[:, spec.layer * spec.width :], len(h.rows)
    gate = prompt.products.product(h.rows, w.inp_gate)
    gate_inputs_kernel[(tokens,)](
        gate, gate.stride(0), h.scales, inputs, inputs.stride(0), None, **_shape(spec.width),
        ACTIVATION=activation_code(spec.activation), SCALED=True, OUT=None, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    hidden = prompt.products.hidden(tokens, spec.width)
    scale_rows(gate, hidden.rows, hidden.scales)
    return prompt.products.product(hidden.rows, w.proj), hidden.scales


def _norm_args(spec: LayerOutputSpec, w: DeviceLayerOutput) -> NormArgs:
    norm: NormSpec = spec.norm
    return NormArgs(w.proj_norm, w.proj_norm, norm.epsilon)


def _shape(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BLOCK": next_power_of_two(width)}
