"""MoE on a GPU: buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS, Activations, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.lora import adapted
from edgeinfer_kernels.cuda.prefill.expert_kernels import (
    GATINGS,
    SHARED,
    SHARED_AND_WEIGHED,
    UNSHARED,
    expert_down_kernel,
    expert_gated_kernel,
    expert_products_kernel,
    select_experts_kernel,
)
from edgeinfer_kernels.cuda.prefill.prefill_rows import warps_for
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    DownConfig,
    GatedConfig,
    GemvConfig,
    NormArgs,
    SharedScores,
)
from edgeinfer_kernels.cuda.triton_ops.layer_output_kernels import add_normed_kernel
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import add_rows_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import Shape, next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.moe_weights import DeviceExperts, RoutingSpace, take
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

__all__ = ["Space", "decode", "prefill", "take"]
PART = "feed-forward"
"""The name of the weights in lists of device memory."""
ADDED_COLUMNS = 256
"""Columns that a program of `add_rows_kernel` adds; rows have a multiple of sixteen."""


def take_state(arena: Arena, spec: MoeSpec, positions: int, kind: CacheType) -> None:
    """It has no state."""
    return


def has_granules(w: DeviceExperts) -> bool:
    """The router is on the device, with or without experts."""
    return True


def inactive_bytes(w: DeviceExperts) -> int:
    """Bytes of the experts that not every token reads."""
    stacks: int = sum(4 * part.numel() for stack in w.stacks.matrices for part in stack.parts)
    return stacks - stacks * w.experts_per_token // w.count


class Space:
    """The buffers of a decode step, shared by all MoE blocks."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        specs: list[MoeSpec] = [block.residual.block for block in blocks]
        weights: list[DeviceExperts] = [block.weights for block in blocks]
        tokens, floats = step.tokens, step.hidden_floats
        self.routing = RoutingSpace(specs, arena, tokens)
        hidden, shared = max(w.hidden for w in weights), max(w.shared_neurons for w in weights)
        self.expert_hidden = take_activations(arena, tokens, hidden, floats, self.routing.experts_per_token)
        self.shared_hidden = take_activations(arena, tokens, shared, floats)
        has_dense = any(spec.dense_norm for spec in specs)
        needed = has_dense or any(spec.pre_attention_router for spec in specs)
        self.other_input = take_activations(arena, tokens, step.hidden_size, step.input_floats, int(needed))
        """What a pre-attention router reads, or the dense feed-forward besides experts."""
        latent = max(spec.latent_size for spec in specs)
        self.latent = take_activations(arena, tokens, latent, step.input_floats)
        self.latent_sum = take_activations(arena, tokens, latent, floats)
        self.latent_rows = arena.take((tokens, padded_rows(latent)), torch.float32)
        """The latent projection, later the sum of the experts' results."""
        back = padded_rows(step.hidden_size) if latent or has_dense else 0
        self.other_result = arena.take((tokens, back), torch.float32)
        """The projection back, or the result of the dense feed-forward."""


def before_layer_decode(step: "DecodeStep", block: DeviceBlock, tokens: int) -> None:
    """Compute the scores of a pre-attention router, which reads the layer's input x."""
    if not block.residual.block.pre_attention_router:
        return
    launches, pre_attention = step.launches, step.space("moe").other_input
    launches.norms.add_norm(None, None, 0.0, NextNorm(block.residual.norm, None, None), pre_attention, tokens)
    _score(step, block.weights, Source(pre_attention, launches.workspace.sum_squares[0]), tokens)


def _score(step: "DecodeStep", w: DeviceExperts, source: Source, tokens: int) -> None:
    scores = step.space("moe").routing.scores
    step.launches.rows((w.router,), source, scores, w.router_bias, "output", tokens)


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """x += scale · Σ weight · expert(h), plus the shared expert. The CPU computes its experts in parallel."""
    spec, w, launches, space = block.residual.block, block.weights, step.launches, step.space("moe")
    if not spec.pre_attention_router:
        _score(step, w, source, tokens)
    launches.launch(
        select_experts_kernel,
        (tokens,),
        space.routing.scores,
        space.routing.scores.stride(0),
        space.routing.ids,
        space.routing.weights,
        launches.or_nothing(w.selection_bias),
        launches.or_nothing(w.expert_scales),
        spec.scale,
        COUNT=spec.experts,
        EXPERTS_PER_TOKEN=spec.experts_per_token,
        GATING=GATINGS[spec.gating],
        NORMALIZED=spec.normalized,
        BIASED=w.selection_bias is not None,
        SCALED=w.expert_scales is not None,
        GROUPS=spec.groups,
        GROUPS_PER_TOKEN=spec.groups_per_token,
        warps=1,
    )
    if stage:
        step.send(stage, tokens, space.routing, spec.experts_per_token, w.slots)
    elif step.collective is not None:
        ids = space.routing.ids[: tokens * spec.experts_per_token]
        # -1: on another rank, also before, if kernels are compiled but not launched.
        ids.copy_(w.slots[0].index_select(0, ids.clamp_min(0)))
    if w.shared is not None:
        _shared(step, spec, w, w.shared, source, tokens)
    if w.here:
        projection = w.latent_down
        read = source if projection is None else _project(step, spec, projection, source, tokens)
        _gated(step, spec, w, read, tokens)
    y = step.workspace.y if w.here or w.shared is not None else None
    if w.latent_up is not None and w.here:
        _project_back(step, spec, w, w.latent_up, tokens)
    elif w.latent_up is None and y is not None:
        _down(step, spec, w, y, tokens)
    scale = block.residual.residual_scale
    if spec.dense_norm is not None:
        if stage:  # The norm is of the sum of all experts.
            step.receive_sum(stage, step.workspace.y, tokens)
        _add_dense(step, spec, w, tokens)
        return step.add(number, y, scale, tokens)
    if stage:
        return step.receive_part(stage, y, scale, number, tokens)
    return step.add(number, y, scale, tokens)


def _project(step: "DecodeStep", spec: MoeSpec, matrix: DeviceMatrix, source: Source, tokens: int) -> Source:
    """The latent projection as activations, which the experts read."""
    launches, space = step.launches, step.space("moe")
    target = space.latent.of_blocks(padded_blocks(spec.latent_size))
    launches.rows((matrix,), source, space.latent_rows, None, "output", tokens)
    launches.norms.quantize(space.latent_rows, spec.latent_size, target, tokens)
    return Source(target, source.sum_squares)


def _project_back(
    step: "DecodeStep", spec: MoeSpec, w: DeviceExperts, matrix: DeviceMatrix, tokens: int
) -> None:
    """y = the experts' sum from the latent projection, plus the shared expert's result, which y holds."""
    launches, space, y = step.launches, step.space("moe"), step.workspace.y
    _down(step, spec, w, space.latent_rows, tokens)
    source = Source(space.latent_sum.of_blocks(matrix.shapes.blocks), step.workspace.sum_squares[0])
    launches.norms.quantize(space.latent_rows, spec.latent_size, source.activations, tokens)
    out = y if w.shared is None else space.other_result
    launches.rows((matrix,), source, out, None, "down", tokens)
    if w.shared is not None:
        launches.launch(
            add_rows_kernel, (tokens, -(-y.shape[1] // ADDED_COLUMNS)), out, y, y.stride(0),
            BLOCK=ADDED_COLUMNS, warps=1,
        )  # fmt: skip


def _shared(
    step: "DecodeStep",
    spec: MoeSpec,
    w: DeviceExperts,
    shared: DeviceFeedForward,
    source: Source,
    tokens: int,
) -> None:
    """Write the shared expert's result to y, and compute the score of its gate. A dense feed-forward reads x
    with another norm, and has another buffer for its result.
    """
    launches, space, y = step.launches, step.space("moe"), step.workspace.y
    if spec.dense_norm is not None:
        norm, y = NextNorm(spec.dense_norm, w.shared_input_norm, None), space.other_result
        launches.norms.add_norm(None, None, 0.0, norm, space.other_input, tokens)
        source = Source(space.other_input, step.workspace.sum_squares[0])
    launches.gated(spec.activation_of_shared, shared, source, space.shared_hidden, tokens)
    hidden = Source(space.shared_hidden, source.sum_squares)
    launches.rows((shared.down,), hidden, y, shared.down_bias, "down", tokens)
    if w.shared_router is not None:
        scores = space.routing.shared_scores
        launches.rows((w.shared_router,), source, scores, None, "output", tokens)


def _add_dense(step: "DecodeStep", spec: MoeSpec, w: DeviceExperts, tokens: int) -> None:
    """y = norm(y), the experts' sum, plus the norm of the dense feed-forward's result."""
    assert spec.dense_norm is not None
    launches, z, y = step.launches, step.space("moe").other_result, step.workspace.y
    width, epsilon = launches.model.spec.hidden_size, spec.dense_norm.epsilon
    nothing = launches.workspace.nothing
    launches.launch(
        add_normed_kernel, (tokens,),
        y, y.stride(0), z, z.stride(0), nothing, NormArgs(w.expert_norm, nothing, epsilon),
        NormArgs(w.shared_norm, nothing, epsilon), WIDTH=width, BLOCK=next_power_of_two(width), SCALED=False,
        warps=warps_for(width),
    )  # fmt: skip


def _gated(step: "DecodeStep", spec: MoeSpec, w: DeviceExperts, source: Source, tokens: int) -> None:
    launches, space = step.launches, step.space("moe")
    out, shape, blocks = space.expert_hidden, launches.tuning.one.gated, source.activations.blocks
    gate, has_gate, has_bias = w.gate or w.up, w.gate is not None, w.up_bias is not None
    tiles, code = (launches.tile(gate), launches.tile(w.up)), activation_code(spec.activation)
    at_once = shape.step_for(blocks)
    inputs = [matrix for matrix in (w.gate, w.up) if matrix is not None]
    _multiply_a(
        step, inputs, source.activations, spec.experts_per_token, shape, tokens * spec.experts_per_token
    )
    launches.launch(
        expert_gated_kernel,
        (w.hidden // ROWS, tokens * spec.experts_per_token),
        launches.parts(gate),
        launches.parts(w.up),
        source.activations.words,
        out.words,
        launches.or_nothing(w.gate_bias),
        launches.or_nothing(w.up_bias),
        space.routing.ids,
        space.routing.weights,
        source.squares_args,
        EXPERT_ROWS=w.hidden,
        EXPERTS_PER_TOKEN=spec.experts_per_token,
        HIDDEN=out.config,
        GATED=GatedConfig(*tiles, has_gate, has_bias, code, spec.weighted_input),
        SOURCE=launches.source_config(source),
        GEMV=GemvConfig(at_once, at_once, 1),
        warps=shape.warps_for(blocks),
    )


def _down(step: "DecodeStep", spec: MoeSpec, w: DeviceExperts, y: Tensor, tokens: int) -> None:
    """y = the experts' sum; without a latent projection with the shared expert's result, which y holds."""
    launches, space = step.launches, step.space("moe")
    read, width = space.expert_hidden, spec.latent_size or launches.model.spec.hidden_size
    at_once = launches.tuning.one.down.step_for(read.blocks)
    kind = UNSHARED
    if w.shared is not None and not spec.latent_size and spec.dense_norm is None:
        kind = SHARED if w.shared_router is None else SHARED_AND_WEIGHED
    _multiply_a(step, [w.down], read, 1, launches.tuning.one.down, tokens * spec.experts_per_token)
    launches.launch(
        expert_down_kernel,
        (width // ROWS, tokens),
        launches.parts(w.down),
        read.words,
        y,
        y.stride(0),
        launches.or_nothing(w.down_bias),
        space.routing.ids,
        space.routing.weights,
        SharedScores(space.routing.shared_scores, space.routing.shared_scores.stride(0)),
        WIDTH=width,
        EXPERTS_PER_TOKEN=spec.experts_per_token,
        READ=read.config,
        GEMV=GemvConfig(at_once, at_once, 1),
        DOWN=DownConfig(launches.tile(w.down), w.down_bias is not None, int(kind), spec.weighted_input),
        warps=launches.tuning.one.down.warps_for(read.blocks),
    )


def _multiply_a(
    step: "DecodeStep",
    matrices: Sequence[DeviceMatrix],
    read: Activations,
    assignments_per_row: int,
    shape: Shape,
    assignments: int,
) -> None:
    """The products a·x of the LoRA adapters of experts, for each assignment."""
    launches, at_once = step.launches, shape.step_for(read.blocks)
    for lora in adapted(launches.model.lora, matrices):
        launches.launch(
            expert_products_kernel,
            (lora.ranks // ROWS, assignments),
            lora.a.parts,
            read.words,
            lora.products,
            step.space("moe").routing.ids,
            ASSIGNMENTS=assignments_per_row,
            READ=read.config,
            GEMV=GemvConfig(at_once, at_once, 1),
            TILE=lora.a.shapes.tile,
            RANK=lora.ranks,
            warps=shape.warps_for(read.blocks),
        )


def before_layer_prefill(prompt: "Prefill", chunk: "Chunk", block: "PromptBlock") -> None:
    """Compute the scores of a pre-attention router, which reads the layer's input x."""
    if block.residual.block.pre_attention_router:
        prompt.experts.score(block.weights, chunk.x)


def waits_for_host(prompt: "Prefill", chunk: "Chunk", block: "PromptBlock") -> bool:
    """Whether the host has to know which experts the tokens are assigned to."""
    assigned = len(chunk.x) * block.residual.block.experts_per_token
    return not prompt.experts.fits_device(block.weights, assigned)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += the selected experts of a chunk of tokens, including the CPU stage if it has one."""
    stage = chunk.parallel_stage(number)
    send = partial(stage.send, chunk.x) if stage else None
    y = prompt.experts.read(block.residual.block, block.weights, chunk.h, block.streamed_experts, send)
    if stage and (block.norms.post_norm is not None or block.residual.block.dense_norm is not None):
        part = prompt.experts.floats[: len(y)]
        stage.receive(part, chunk.start)  # The host's part of the sum.
        y += part
    elif stage:
        stage.receive(chunk.x, chunk.start)
    if block.residual.block.dense_norm is not None:
        prompt.experts.add_dense(block.residual.block, block.weights, chunk.x, y)
    prompt.add(chunk, number, y, None)
