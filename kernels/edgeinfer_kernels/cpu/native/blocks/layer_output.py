"""The end of a layer: the per-layer input and the layer's scale; before the first layer, the per-layer inputs
of all layers.
"""

from edgeinfer_kernels.cpu.native.blocks.phases import (
    first_weights,
    next_piece,
    normalize,
    normalize_and_quantize,
    project,
)
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier,
    barrier_and_clear,
    barrier_prefetching,
    next_item,
    next_token,
)
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.vector_math import activate
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import LayerOutputArgs

exports = Exports()


@device_function
def combine_inputs(pool, counter, block, tokens):
    """Phase: the inputs of each layer = (norm(projected) + embeddings · scale) / √2, layer by layer."""
    layers, width = block.layers, block.width
    scale, half = splat_f32(block.embedding_scale), splat_f32(block.input_scale)
    while True:
        item = next_item(pool, counter)
        token = item // layers
        if token >= tokens:
            break
        first = 4 * width * (item - token * layers)
        projected = block.projected_inputs + token * block.inputs_stride + first
        rows = block.inputs + token * block.inputs_stride + first
        normalize(block.input_norm, projected, projected)
        for i in range(0, width, 16):
            y = multiply_add(load_floats(rows + 4 * i), scale, load_floats(projected + 4 * i))
            store_floats(rows + 4 * i, multiply(y, half))


@exports.add("per_layer_inputs_block", LayerOutputArgs, StepArgs, ThreadPoolArgs, int)
def per_layer_inputs_block(block, step_args, pool, thread):
    """The per-layer inputs of the tokens of a step, whose per-layer embeddings are in the buffer."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    matrix = block.model_proj
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, matrix)
    barrier_prefetching(pool, thread, ahead, end)
    out = block.projected_inputs
    project(pool, 1, thread, tokens, matrix, block.normed, out, block.inputs_stride, scratch)
    barrier(pool, thread)
    combine_inputs(pool, 2, block, tokens)


@device_function
def gate_inputs(pool, counter, block, tokens):
    """Phase: hidden = activation(hidden) ⊙ the layer's input, in the input format of W_proj."""
    hidden = block.hidden
    inputs = block.inputs + 4 * block.width * block.layer
    code = block.activation
    while True:
        token, first, last = next_piece(pool, counter, hidden.columns)
        if token >= tokens:
            break
        row = hidden.floats + token * hidden.float_stride
        own = inputs + token * block.inputs_stride
        for i in range(first, last, 16):
            y = multiply(activate(code, load_floats(row + 4 * i)), load_floats(own + 4 * i))
            store_floats(row + 4 * i, y)
        write_activations(row, hidden, token, tokens, first, last)


@device_function
def finish_layer(pool, counter, thread, block, step_args):
    """Phase: x ← scale · (x + norm(projected)), or scale · x without per-layer inputs."""
    tokens = step_args.tokens
    scale = splat_f32(block.scale)
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        row = block.projected + token * block.projected_stride
        if block.inputs != 0:
            normalize(block.post_norm, row, row)
        for i in range(0, block.norm.padded, 16):
            value = load_floats(x + 4 * i)
            if block.inputs != 0:
                value = add(value, load_floats(row + 4 * i))
            store_floats(x + 4 * i, multiply(value, scale))
        token = next_token(pool, counter, tokens, token)


@exports.add("layer_output_block", LayerOutputArgs, StepArgs, ThreadPoolArgs, int)
def layer_output_block(block, step_args, pool, thread):
    """x ← scale · (x + norm(W_proj · (activation(W_gate · x) ⊙ input))) for the tokens of a step."""
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    if block.inputs != 0:
        gate, hidden, proj = block.inp_gate, block.hidden, block.proj
        normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
        ahead, end = first_weights(pool, thread, tokens, gate)
        barrier_prefetching(pool, thread, ahead, end)
        project(pool, 1, thread, tokens, gate, block.normed, hidden.floats, hidden.float_stride, scratch)
        ahead, end = first_weights(pool, thread, tokens, proj)
        ahead = barrier_prefetching(pool, thread, ahead, end)
        gate_inputs(pool, 2, block, tokens)
        barrier_prefetching(pool, thread, ahead, end)
        project(pool, 3, thread, tokens, proj, hidden, block.projected, block.projected_stride, scratch)
        barrier_and_clear(pool, thread)
    finish_layer(pool, 4, thread, block, step_args)
