"""A norm before the last projection of a block, and the scales of matrices (BitNet)."""

from dataclasses import dataclass

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec, TensorReader
from edgeinfer_kernels.matrix import Vector


@dataclass(frozen=True)
class SubNorm:
    """The norm of gain · x, times `weight`."""

    weight: Vector
    gain: float = 1.0

    def spec(self, norm: NormSpec) -> NormSpec:
        """`norm` for rows x without the gain: it changes ε only."""
        return NormSpec(norm.kind, norm.epsilon / self.gain**2, norm.has_weights)


def matrix_scale(tensors: TensorReader, name: str) -> float:
    """The factor of a matrix's products, `name`.scale; 1 without one."""
    found = tensors.vector(f"{name}.scale", 1)
    return 1.0 if found is None else float(found[0])


def read_sub_norm(tensors: TensorReader, name: str, width: int, output: str, gain: float = 1.0) -> SubNorm:
    """The norm `name` before the matrix `output`, whose scale is a factor of the norm's weights."""
    weight = tensors.required(f"{name}.weight", width) * np.float32(matrix_scale(tensors, output))
    return SubNorm(weight if gain >= 0 else -weight, abs(gain) or 1.0)


def read_attention_sub_norm(
    tensors: TensorReader, width: int, head_dim: int
) -> tuple[SubNorm, Vector | None]:
    """The norm of the heads' results, and the factors of queries: the scales of q and k."""
    q, k, v = (matrix_scale(tensors, f"attn_{part}") for part in "qkv")
    factors = None if q * k == 1 else np.full(head_dim, q * k, np.float32)
    return read_sub_norm(tensors, "attn_sub_norm", width, "attn_output", v), factors
