"""Weights in the device's planes, unpacked one by one, equal those of the file's decoder."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import dequantize_kernel
from edgeinfer_kernels.cuda.weights import packing
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import TILES, PlaneShapes, UnsupportedOnDeviceError
from edgeinfer_quant_formats import block_format, decode
from tests.kernels.cuda.device_matrices import SOURCES, device_matrix, normal_rows, rows_from


def columns_for(name: str) -> int:
    """A row length that is no multiple of sixteen blocks."""
    return 768 if block_format(name).block_elements > 32 else 96


def dequantized(matrix: DeviceMatrix, first_row: int, rows: int) -> Any:
    """(rows, columns) float16, NaN where nothing was written."""
    shapes = matrix.shapes
    blocks, columns = shapes.blocks, shapes.columns
    out = torch.full((rows + 1, columns), float("nan"), dtype=torch.float16, device=matrix.words.device)
    dequantize_kernel[(-(-blocks // 32), -(-rows // 16))](
        matrix.parts, first_row, out, rows, COLUMNS=columns, BLOCKS=blocks, STEP=32, TILE=shapes.tile
    )
    assert torch.isnan(out[rows]).all()
    return out[:rows].cpu().numpy()


def decoded(name: str, raw: Any) -> Any:
    with np.errstate(over="ignore"):
        return decode(raw.reshape(-1), name).reshape(len(raw), -1).astype(np.float16)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("source", SOURCES)
def test_packing_round_trips_every_weight(device: str, name: str, source: str) -> None:
    rows, columns = 9, columns_for(name)
    raw = rows_from(source, name, rows, columns)
    actual = dequantized(device_matrix(device, name, raw, columns), 0, rows)
    np.testing.assert_allclose(actual, decoded(name, raw), rtol=1.1e-3, atol=6e-8)


@pytest.mark.parametrize("name", ["Q5_1", "Q6_K"])
def test_packing_round_trips_rows_from_the_middle(device: str, name: str) -> None:
    raw = normal_rows(name, 18, columns_for(name))
    actual = dequantized(device_matrix(device, name, raw, columns_for(name)), 7, 5)
    np.testing.assert_allclose(actual, decoded(name, raw[7:12]), rtol=1.1e-3, atol=6e-8)


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS", "NVFP4"])
def test_rows_that_are_packed_in_pieces_are_those_packed_at_once(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = columns_for(name)
    raw = normal_rows(name, 19, columns)
    whole = device_matrix(device, name, raw, columns)
    for limit in ("MAX_WEIGHTS", "MAX_GRID_WEIGHTS"):
        monkeypatch.setattr(packing, limit, 7 * columns)
    pieces = device_matrix(device, name, raw, columns)
    assert all(torch.equal(*parts) for parts in zip(whole.parts, pieces.parts, strict=True))


@pytest.mark.parametrize("name", TILES)
def test_bytes_on_the_device_are_those_of_the_planes(device: str, name: str) -> None:
    matrix = device_matrix(device, name, normal_rows(name, 18, 768), 768)
    assert matrix.shapes.nbytes == sum(part.numel() * part.element_size() for part in matrix.parts)
    assert matrix.shapes.padded_rows == 32
    assert matrix.shapes.blocks == 32


def test_a_format_or_a_row_without_a_kernel_is_named() -> None:
    with pytest.raises(
        UnsupportedOnDeviceError, match=r"a\.weight: F64 has no kernel on the GPU; it has F32, F16, Q4_0"
    ):
        PlaneShapes.of("a.weight", "F64", 16, 256)
    with pytest.raises(UnsupportedOnDeviceError, match=r"b: rows of 100 weights, .* multiple of 32"):
        PlaneShapes.of("b", "F16", 16, 100)
