"""The structure that the kernels of a layer's end read."""

import math

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.layer_output import LayerOutputSpec, LayerOutputWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.recurrent_args import LayerOutputArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("layer_output",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[LayerOutputSpec],
    weights: ResidualWeights[LayerOutputWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a layer's end; that of the first layer also computes the per-layer inputs."""
    block = layer_output_args(builder, residual.block, weights.block)
    before = (Call("per_layer_inputs_block", block),) if residual.block.is_first else ()
    return BuiltBlock((Call("layer_output_block", block, ends_by_token=True),), before)


def layer_output_args(builder: BlockBuilder, spec: LayerOutputSpec, w: LayerOutputWeights) -> int:
    """A LayerOutputArgs structure."""
    return builder.arena.fill(
        LayerOutputArgs,
        norm=builder.norm(spec.norm, builder.width, None),
        scale=w.scale,
        **(_per_layer(builder, spec, w) if spec.width else {}),
        **builder.scratch(),
    )


def _per_layer(builder: BlockBuilder, spec: LayerOutputSpec, w: LayerOutputWeights) -> dict[str, float]:
    """The fields of the per-layer input."""
    assert w.inp_gate is not None
    assert w.proj is not None
    rows = builder.workspace.rows
    inputs, stride = rows("per_layer")
    projected, projected_stride = rows("projected")
    readers = [w.inp_gate, *([] if w.model_proj is None else [w.model_proj])]
    fields = {
        "layer": spec.layer,
        "layers": spec.layers,
        "width": spec.width,
        "activation": builder.activation(spec.activation),
        "inputs": inputs,
        "inputs_stride": stride,
        "normed": builder.input("normed", builder.width, readers),
        "hidden": builder.input("hidden", spec.width, [w.proj]),
        "inp_gate": builder.matrix(w.inp_gate),
        "proj": builder.matrix(w.proj),
        "post_norm": builder.norm(spec.norm, builder.width, w.post_norm),
        "projected": projected,
        "projected_stride": projected_stride,
        "embedding_scale": math.sqrt(spec.width),
        "input_scale": math.sqrt(0.5),
    }
    if w.model_proj is None:
        return fields
    # The norm of v / √d is that of v with ε · d.
    norm = NormSpec(spec.norm.kind, spec.norm.epsilon * builder.width)
    return {
        **fields,
        "model_proj": builder.matrix(w.model_proj),
        "projected_inputs": rows("per_layer.projected")[0],
        "input_norm": builder.norm(norm, spec.width, w.proj_norm),
    }
