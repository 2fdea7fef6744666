"""Reads the projections of queries, keys and values, which files store together or apart."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeinfer_kernels.blocks.common.block import TensorReader
from edgeinfer_kernels.matrix import Matrix, Vector


def read_projections(
    tensors: TensorReader, rows: Sequence[int], width: int, values_from_keys: bool = False
) -> list[Matrix]:
    """Query, key and value with `width` columns: three tensors, or row ranges of one; or two tensors, if
    values can be projected as keys.
    """
    fused = tensors.matrix_or_none("attn_qkv", sum(rows), width)
    if fused is None:
        if values_from_keys and tensors.matrix_or_none("attn_v", rows[2], width) is None:
            q, k = (
                tensors.matrix(f"attn_{part}", count, width) for part, count in zip("qk", rows, strict=False)
            )
            return [q, k, replace(k)]
        return [tensors.matrix(f"attn_{part}", count, width) for part, count in zip("qkv", rows, strict=True)]
    ends = np.cumsum(rows).tolist()
    return [fused.take_rows(end - count, end) for end, count in zip(ends, rows, strict=True)]


def any_of(vectors: Sequence[Vector | None]) -> bool:
    return any(vector is not None for vector in vectors)


def stacked_lengths(biases: Sequence[Vector | None], matrices: Sequence[Matrix]) -> tuple[int, ...]:
    """The length of one vector for the biases of matrices, each padded to sixteen rows; () without any."""
    return (sum(-(-matrix.rows // 16) * 16 for matrix in matrices),) if any_of(biases) else ()


def read_biases(tensors: TensorReader, rows: Sequence[int]) -> list[Vector | None]:
    """The biases of query, key and value; None: there is none."""
    fused = tensors.vector("attn_qkv.bias", sum(rows))
    if fused is not None:
        return list(np.split(fused, np.cumsum(rows)[:-1]))
    return [tensors.vector(f"attn_{part}.bias", count) for part, count in zip("qkv", rows, strict=True)]
