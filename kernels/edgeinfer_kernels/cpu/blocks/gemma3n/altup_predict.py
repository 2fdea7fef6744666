"""The structures that the kernels of AltUp before a layer read."""

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.gemma3n.altup_predict import (
    AltUpPredictSpec,
    AltUpPredictWeights,
    AltUpRouter,
)
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows
from edgeinfer_kernels.cpu.runtime.gemma3n_args import AltUpProjectionArgs, StreamsArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Matrix, Vector

UNITS = ("gemma3n.altup",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[AltUpPredictSpec],
    weights: ResidualWeights[AltUpPredictWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernels of AltUp before a layer; those of the first layer also expand x to the streams."""
    spec, w = residual.block, weights.block
    streams = streams_args(builder, spec.norm, spec.streams, w.router, w.coef)
    expand = [
        Call("altup_expand_block", projection_args(builder, streams, index, matrix), ends_by_token=True)
        for index, matrix in enumerate(w.expand, 1)
    ]
    return BuiltBlock((*expand, Call("altup_predict_block", streams, ends_by_token=True)))


def streams_args(builder: BlockBuilder, norm: NormSpec, count: int, router: AltUpRouter, coef: Vector) -> int:
    """A StreamsArgs structure; `coef`: rows of `count` elements."""
    rows, stride = builder.workspace.rows("streams")
    predictions, _ = builder.workspace.rows("predictions")
    gains = router.weight.reshape(count, -1) * router.norm / np.float32(builder.width)
    return builder.arena.fill(
        StreamsArgs,
        count=count,
        width=builder.width,
        padded=padded(builder.width),
        row_bytes=4 * padded(builder.width),
        streams=rows,
        predictions=predictions,
        stride=stride,
        gains=builder.arena.keep(padded_rows(gains)),
        epsilon=norm.epsilon,
        coefs=builder.arena.keep(padded_rows(coef.reshape(-1, count))),
        **builder.scratch(),
    )


def projection_args(
    builder: BlockBuilder, streams: int, index: int, matrix: Matrix, scale: float = 1.0
) -> int:
    """An AltUpProjectionArgs structure of the stream at this index."""
    projected, projected_stride = builder.workspace.rows("projected")
    return builder.arena.fill(
        AltUpProjectionArgs,
        streams=streams,
        at=4 * padded(builder.width) * index,
        matrix=builder.matrix(matrix),
        norm=builder.norm(NormSpec("rms", 0.0), builder.width, None),
        normed=builder.input("normed", builder.width, [matrix]),
        scale=scale,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
