"""The structures that the kernels of AltUp after a layer read."""

from edgeinfer_kernels.blocks.gemma3n.altup_correct import AltUpCorrectSpec, AltUpCorrectWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.gemma3n.altup_predict import projection_args, streams_args
from edgeinfer_kernels.cpu.blocks.layer_output import layer_output_args
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_vector
from edgeinfer_kernels.cpu.runtime.gemma3n_args import AltUpCorrectArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("gemma3n.altup", "layer_output")
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[AltUpCorrectSpec],
    weights: ResidualWeights[AltUpCorrectWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernels of AltUp after a layer; those of the last layer also merge the streams, those of the first
    one compute the per-layer inputs.
    """
    spec, w = residual.block, weights.block
    streams = streams_args(builder, spec.norm, spec.streams, w.router, w.coef)
    output = layer_output_args(builder, spec.output, w.output)
    block = builder.arena.fill(
        AltUpCorrectArgs,
        streams=streams,
        correct_scale=builder.arena.keep(padded_vector(w.scale)),
        output=output,
    )
    last = len(w.merge)
    merge = [
        Call("altup_merge_block", projection_args(builder, streams, index, matrix, scale), ends_by_token=True)
        for index, matrix in enumerate(w.merge, 1)
        for scale in [1 / spec.streams if index == last else 1.0]
    ]
    before = (Call("per_layer_inputs_block", output),) if spec.output.is_first else ()
    return BuiltBlock((Call("altup_correct_block", block, ends_by_token=True), *merge), before)
