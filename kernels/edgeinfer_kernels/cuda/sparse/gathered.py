"""The feed-forwards of a step that read only active neurons on a GPU: the launches of their kernels."""

from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cpu.runtime.abi import OUTPUTS_PER_TILE
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import ROWS, Activations
from edgeinfer_kernels.cuda.sparse.column_matrix import ColumnMatrix, GatheredSpace
from edgeinfer_kernels.cuda.sparse.gather_kernels import (
    add_parts_kernel,
    gathered_down_kernel,
    list_active_kernel,
    sparse_gated_kernel,
    sum_parts_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.activations import activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import GatedConfig, GemvConfig
from edgeinfer_kernels.sizes.gathered_neurons import GATHERED_SEGMENT

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
    from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches


def launch_gated(
    launches: "StepLaunches",
    activation: Activation,
    ffn: "DeviceFeedForward",
    source: Source,
    out: Activations,
    tokens: int,
) -> None:
    """Gate, and up of the neurons whose gate is positive, to the hidden rows of at most MAX_VECTOR_TOKENS
    tokens.
    """
    if ffn.gate is None:
        launches.gated(activation, ffn, source, out, tokens)
        return
    gate, up = ffn.gate, ffn.up
    config = GatedConfig(
        gate.shapes.tile, up.shapes.tile, True, ffn.up_bias is not None, activation_code(activation)
    )
    gemv, options = launches.tuning.vector_gemv("gated", tokens, (gate.shapes, up.shapes))
    launches.launch(
        sparse_gated_kernel,
        (up.shapes.padded_rows // ROWS,),
        gate.parts,
        up.parts,
        source.activations.words,
        out.words,
        launches.or_nothing(ffn.gate_bias),
        launches.or_nothing(ffn.up_bias),
        source.squares_args,
        HIDDEN=out.config,
        GATED=config,
        SOURCE=launches.source_config(source),
        GEMV=gemv,
        **options,
    )


def launch_down(
    launches: "StepLaunches", down: ColumnMatrix, hidden: Activations, space: GatheredSpace, tokens: int
) -> int:
    """List the active neurons and add up their columns, segment by segment; the number of segments."""
    neurons = down.shapes.columns
    segments, offsets = -(-neurons // GATHERED_SEGMENT), down.offsets
    constants = {"TOKENS": tokens, "SEGMENT": GATHERED_SEGMENT, "warps": 4}
    launches.launch(
        list_active_kernel,
        (segments,),
        hidden.words,
        space.neurons,
        space.counts,
        space.listed,
        COUNT=neurons,
        HIDDEN=hidden.config,
        **constants,
    )
    launches.launch(
        gathered_down_kernel,
        (offsets.outputs // OUTPUTS_PER_TILE, segments),
        down.memory,
        space.neurons,
        space.counts,
        space.listed,
        space.parts,
        OFFSETS=offsets,
        FORMAT=down.format,
        **constants,
    )
    return segments


def launch_sum(
    launches: "StepLaunches", space: GatheredSpace, segments: int, y: Tensor, bias: Tensor | None, tokens: int
) -> None:
    """The sums of the segments, plus the bias of down, to y."""
    width = launches.model.spec.hidden_size
    launches.launch(
        sum_parts_kernel,
        (width // ROWS,),
        space.parts,
        y,
        launches.or_nothing(bias),
        segments,
        y.stride(0),
        OUTPUTS=width,
        TOKENS=tokens,
        BIAS=bias is not None,
        warps=1,
    )


def launch_add(
    launches: "StepLaunches",
    space: GatheredSpace,
    segments: int,
    bias: Tensor | None,
    scale: float,
    norm: NextNorm,
    x: Tensor,
    target: Source,
    tokens: int,
) -> None:
    """x += scale·(the sums of the segments + bias), and x·gain to the target."""
    out = target.activations
    launches.launch(
        add_parts_kernel,
        (launches.model.spec.hidden_size // ROWS,),
        space.parts,
        x,
        launches.or_nothing(bias),
        scale,
        launches.or_nothing(norm.weight),
        out.words,
        target.sum_squares,
        segments,
        OUTPUTS=launches.model.spec.hidden_size,
        OUT=out.config,
        GEMV=GemvConfig(0, 0, tokens),
        BIAS=bias is not None,
        GAIN=norm.weight is not None,
        warps=1,
    )
