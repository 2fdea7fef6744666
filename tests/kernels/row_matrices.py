"""Random weight matrices of every format, and exact products with them."""

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import RandomBlocks
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import address, interleave, kernel_format
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_BYTES, ACTIVATIONS, ROWS_SCRATCH, STARTS
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import allocate
from edgeinfer_quant_formats import block_format, encode
from edgeinfer_quant_formats.codecs import ENCODERS

FLOATS = ("F32", "F16", "BF16")


def random_matrix(name: str, rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> Matrix:
    """Normal values of this scale, encoded in the format; random codes if it has no encoder."""
    if block_format(name).grid or name not in ENCODERS:
        blocks = RandomBlocks(name, scale, np.random.default_rng(seed))
        raw = blocks.take(rows * columns // block_format(name).block_elements).reshape(rows, -1)
        return Matrix(f"{name}.weight", name, rows, columns, raw)
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * scale
    raw = encode(values.reshape(-1), name).reshape(rows, block_format(name).row_bytes(columns))
    return Matrix(f"{name}.weight", name, rows, columns, raw)


def activation_blocks(q: npt.NDArray[np.int8], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Activations in kernel layout, (tokens, bytes), of numbers (tokens, blocks, 32) and scales (tokens,
    blocks).
    """
    first, last = np.moveaxis(q.reshape(*scales.shape, 2, 16).sum(-1, dtype=np.int32), -1, 0)
    sums = {"all": first + last, "first": first, "last": last}
    blocks = np.zeros((*scales.shape, ACTIVATION_BYTES), np.uint8)
    blocks[..., : ACTIVATIONS.scale] = q.view(np.uint8)
    floats, starts = blocks[..., ACTIVATIONS.scale : ACTIVATIONS.starts], blocks[..., ACTIVATIONS.starts :]
    scaled = np.stack([np.ones_like(scales), *sums.values()], -1) * scales[..., None]
    floats.view(np.float32)[:] = scaled
    starts.view(np.int32)[:] = np.stack([-offset * sums[columns] for columns, offset in STARTS], -1)
    return blocks.reshape(len(q), -1)


def quantized_rows(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Rows in kernel layout, and the values that they represent."""
    tokens = len(x)
    blocks = x.reshape(tokens, -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    q = np.rint(blocks * inverse).astype(np.int8)
    scales = largest * np.float32(1 / 127)
    return activation_blocks(q, scales[..., 0]), (q * scales.astype(np.float64)).reshape(tokens, -1)


def bfloats(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """The nearest bfloat16, ties away from zero."""
    rounded = x.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def tiled_rows(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rows in the layout of AMX kernels: tiles of 16 tokens by 32 columns; NaN where there is no token."""
    tokens, columns = -(-len(x) // 16) * 16, x.shape[1]
    whole = np.full((tokens, columns), np.nan, np.float32)
    whole[: len(x)] = x
    bits = (bfloats(whole).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(bits.reshape(-1, 16, columns // 32, 32).transpose(0, 2, 1, 3))


def multiply_by_tiles(
    kernels: Kernels, matrix: Matrix, x: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """As `multiply`, with AMX; the reference is that of weights and activations rounded to bfloat16."""
    rows, memory = tiled_rows(x), interleave(matrix, kernels)
    out = np.full((len(x), padded(matrix.rows)), np.nan, np.float32)
    scratch = allocate(ROWS_SCRATCH)
    scratch[:] = 255
    kernels.function(f"tile_rows_{kernel_format(matrix)}", 10)(
        address(memory),
        matrix.columns,
        0,
        matrix.rows,
        address(rows),
        0,
        len(x),
        address(out),
        out.strides[0],
        address(scratch),
    )
    exact = bfloats(x).astype(np.float64) @ bfloats(matrix.decoded()).astype(np.float64).T
    return out[:, : matrix.rows], exact


def multiply(
    kernels: Kernels, matrix: Matrix, x: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """(matrix · x by the kernel, the same in float64), x (tokens, columns); the output starts as NaN."""
    tokens = len(x)
    if matrix.format in FLOATS:
        rows = np.zeros((tokens, padded(matrix.columns)), np.float32)
        rows[:, : matrix.columns] = x
        exact = x.astype(np.float64)
        columns = -(-matrix.columns // 4) * 4
    else:
        quantized, exact = quantized_rows(x)
        columns = matrix.columns
        rows = quantized.view(np.float32)
    memory = interleave(matrix, kernels)
    out = np.full((tokens, padded(matrix.rows)), np.nan, np.float32)
    scratch = allocate(ROWS_SCRATCH)
    kernels.function(f"rows_{kernel_format(matrix)}", 10)(
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
