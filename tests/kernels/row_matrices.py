"""Random weight matrices of every format, and exact products with them."""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import padded
from edgeinfer_kernels.cpu.memory import address, allocate, interleave
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cpu.structures import ROWS_SCRATCH
from edgeinfer_kernels.weights import Matrix
from edgeinfer_quant_formats import block_format, encode

FLOATS = ("F32", "F16", "BF16")


def random_matrix(name: str, rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> Matrix:
    """Normal values of this scale, encoded in the format."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * scale
    raw = encode(values.reshape(-1), name).reshape(rows, block_format(name).row_bytes(columns))
    return Matrix(f"{name}.weight", name, rows, columns, raw)


def quantised_rows(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Rows as the kernels take them, and the values that these stand for."""
    tokens = len(x)
    blocks = x.reshape(tokens, -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    q = np.rint(blocks * inverse).astype(np.int8)
    scales = largest * np.float32(1 / 127)
    sums = q.reshape(tokens, -1, 16).sum(-1, dtype=np.int32)
    parts = [q.reshape(tokens, -1), scales[..., 0], sums]
    rows = np.concatenate(
        [np.ascontiguousarray(part).view(np.uint8).reshape(tokens, -1) for part in parts], 1
    )
    return np.ascontiguousarray(rows), (q * scales.astype(np.float64)).reshape(tokens, -1)


def multiply(
    kernels: Kernels, matrix: Matrix, x: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """(matrix · x by the kernel, the same in float64), x (tokens, columns); the output starts as NaN."""
    tokens = len(x)
    kernel_format = "TQ2_0" if matrix.format == "TQ1_0" else matrix.format
    if matrix.format in FLOATS:
        rows = np.zeros((tokens, padded(matrix.columns)), np.float32)
        rows[:, : matrix.columns] = x
        exact = x.astype(np.float64)
        columns = -(-matrix.columns // 4) * 4
    else:
        quantised, exact = quantised_rows(x)
        columns = matrix.columns
        rows = quantised.view(np.float32)
    memory = interleave(matrix, kernels)
    out = np.full((tokens, padded(matrix.rows)), np.nan, np.float32)
    scratch = allocate(ROWS_SCRATCH)
    kernels.function(f"rows_{kernel_format}", 10)(
        address(memory),
        columns,
        0,
        matrix.rows,
        address(rows),
        rows.strides[0],
        tokens,
        address(out),
        out.strides[0],
        address(scratch),
    )
    return out[:, : matrix.rows], exact @ matrix.decoded().astype(np.float64).T
