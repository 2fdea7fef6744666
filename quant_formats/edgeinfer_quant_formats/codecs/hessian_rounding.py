"""Rounds the columns of a matrix in order, and corrects the later ones for the error of each (GPTQ).

The error of the outputs of a matrix W on inputs X is tr((W-Q)·H·(W-Q)ᵀ) with H = Σ x·xᵀ. If column j is
rounded by e, the best change of the columns after it is -e·U[j, j+1:]/U[j, j], where U is the upper Cholesky
factor of H⁻¹. Source: Frantar et al., GPTQ, 2022. Scales are those of the ordinary encoder for the corrected
weights of a block, with 1/U[j, j]² as the importance of column j: what an error costs after the correction.
"""

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs import decode, encode
from edgeinfer_quant_formats.codecs.bit_fields import field_bytes, pack_blocks
from edgeinfer_quant_formats.formats import FormatSpec, block_format

ROUNDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""The formats whose weights are a scale times the code plus an offset."""
DAMPING = 0.01
"""Added to the diagonal of H, as a share of its mean."""
STEP = 32
"""Columns after which the correction of all later columns is computed as one product."""
FACTOR_BLOCK = 256
"""Columns that are factorized at a time."""

Floats = NDArray[np.float32]


def encode_by_hessian(
    weights: Floats, format: str | FormatSpec, hessian: NDArray[np.floating]
) -> NDArray[np.uint8]:
    """Weights (rows, columns) as blocks of one of the `ROUNDED` formats, (rows, bytes of a row), with a small
    error of the outputs on inputs whose Σ x·xᵀ is `hessian`, (columns, columns).

    Raises:
        FormatError: weights that aren't finite, or don't fill whole blocks.
    """
    spec = block_format(format)
    factor = inverse_factor(hessian)
    importance = (1 / np.diag(factor).astype(np.float64) ** 2).astype(np.float32)
    rest = np.ascontiguousarray(weights.T, np.float32)
    width, parts = spec.block_elements, []
    for first in range(0, len(rest), width):
        block = slice(first, first + width)
        coded = encode(np.ascontiguousarray(rest[block].T), spec, importance[block])
        blocks = coded.reshape(-1, spec.block_bytes)
        codes, errors = _rounded(rest[block], factor[block, block], spec, blocks)
        rest[first + width :] -= factor[block, first + width :].T @ errors
        parts.append(_with_codes(spec, blocks, np.ascontiguousarray(codes.T)))
    return np.stack(parts, axis=1).reshape(weights.shape[0], -1)


def inverse_factor(hessian: NDArray[np.floating]) -> Floats:
    """The upper Cholesky factor of the inverse of the damped `hessian`, (columns, columns).

    With the columns in reverse order, H = M·Mᵀ for a lower M, whose inverse in that order is the factor. Both
    are computed in place, so that one copy of a large Hessian in float64 is needed.
    """
    flipped = hessian[::-1, ::-1].astype(np.float64)
    mean = float(np.trace(flipped)) / len(flipped)
    flipped[np.diag_indices_from(flipped)] += DAMPING * mean if mean > 0 else 1.0
    _factorize(flipped)
    _invert_lower(flipped)
    return np.ascontiguousarray(flipped[::-1, ::-1], np.float32)


def _factorize(matrix: NDArray[np.float64]) -> None:
    """Replace a positive definite matrix by its lower Cholesky factor."""
    for block, below in _blocks(len(matrix)):
        matrix[block, below] = 0
        matrix[block, block] = np.linalg.cholesky(matrix[block, block])
        matrix[below, block] = np.linalg.solve(matrix[block, block], matrix[below, block].T).T
        for first in range(below.start, len(matrix), FACTOR_BLOCK):
            rows, columns = slice(first, None), slice(first, first + FACTOR_BLOCK)
            matrix[rows, columns] -= matrix[rows, block] @ matrix[columns, block].T


def _invert_lower(matrix: NDArray[np.float64]) -> None:
    """Replace a lower triangular matrix by its inverse."""
    for block, below in reversed(_blocks(len(matrix))):
        matrix[block, block] = np.tril(np.linalg.inv(matrix[block, block]))
        matrix[below, block] = -(matrix[below, below] @ matrix[below, block]) @ matrix[block, block]


def _blocks(count: int) -> list[tuple[slice, slice]]:
    """Blocks of rows, each with all rows below it."""
    starts = range(0, count, FACTOR_BLOCK)
    ends = [min(start + FACTOR_BLOCK, count) for start in starts]
    return [(slice(start, end), slice(end, count)) for start, end in zip(starts, ends, strict=True)]


def _rounded(
    columns: Floats, factor: Floats, spec: FormatSpec, blocks: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], Floats]:
    """The codes of one block of columns (columns, rows), which are corrected, and their errors divided by the
    factor's diagonal.
    """
    highest = (1 << spec.bits) - 1
    offset = _levels(spec, blocks, 0)
    scale = (_levels(spec, blocks, highest) - offset) / np.float32(highest)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    for first in range(0, len(columns), STEP):
        last = min(first + STEP, len(columns))
        for index in range(first, last):
            code = np.clip(np.rint((columns[index] - offset[index]) * inverse[index]), 0, highest)
            codes[index] = code
            errors[index] = (columns[index] - code * scale[index] - offset[index]) / factor[index, index]
            columns[index + 1 : last] -= factor[index, index + 1 : last, None] * errors[index]
        columns[last:] -= factor[first:last, last:].T @ errors[first:last]
    return codes, errors


def _levels(spec: FormatSpec, blocks: NDArray[np.uint8], code: int) -> Floats:
    """The weights of blocks if all their codes were `code`, (weights of a block, blocks)."""
    codes = np.full((len(blocks), spec.block_elements), code, np.uint8)
    return np.ascontiguousarray(decode(_with_codes(spec, blocks, codes), spec).reshape(codes.shape).T)


def _with_codes(spec: FormatSpec, blocks: NDArray[np.uint8], codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The blocks with other codes."""
    coded = {part.field for part in spec.codes}
    fields = {
        field.name: field_bytes(spec, blocks, field.name) for field in spec.fields if field.name not in coded
    }
    return pack_blocks(spec, codes, **fields)
