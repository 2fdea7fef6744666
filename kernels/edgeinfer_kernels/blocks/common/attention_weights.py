"""The weights of an attention block, and the check whether a GPU supports them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights
from edgeinfer_kernels.blocks.common.sub_norms import SubNorm
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector

if TYPE_CHECKING:
    from edgeinfer_kernels.blocks.attention import AttentionSpec


@dataclass(frozen=True)
class AttentionWeights(BlockWeights):
    """The weights of an attention block, by GGUF name; None where the architecture has no such weight."""

    kind: ClassVar[str] = "attention"

    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    attn_q_bias: Vector | None = None
    attn_k_bias: Vector | None = None
    attn_v_bias: Vector | None = None
    attn_output_bias: Vector | None = None
    attn_q_norm: Vector | None = None
    attn_k_norm: Vector | None = None
    query_weights: Vector | None = None
    """Factors of a head's query after RoPE."""
    attn_sinks: Vector | None = None
    attn_gate: Matrix | None = None
    """A row for each head."""
    sub_norm: SubNorm | None = None

    def inputs(self) -> list[Matrix]:
        """The matrices of queries, keys, values and gates, if there are any."""
        found = [matrix for matrix in (self.attn_q, self.attn_k, self.attn_v) if matrix.rows]
        return found if self.attn_gate is None else [*found, self.attn_gate]

    def matrices(self) -> list[Matrix]:
        return [*self.inputs(), self.attn_output]


def check_device_rows(
    spec: "AttentionSpec", q: MatrixSize | Matrix, k: MatrixSize | Matrix, v: MatrixSize | Matrix
) -> None:
    """Raise `UnsupportedOnDeviceError` if the GPU kernels don't support the projections."""
    if q.rows % ROW_MULTIPLE or k.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{k.name}: {k.rows} rows (q: {q.rows}), the GPU kernels need a multiple of {ROW_MULTIPLE}"
        )
    if spec.head_gated and v.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{v.name}: {v.rows} rows before gates, the GPU kernels need a multiple of {ROW_MULTIPLE}"
        )
