"""Matrices that the CPU stores by neuron, unpacked on the device, equal those of the file's decoder."""

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    NEURON_FORMATS,
    ColumnLayout,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
)
from edgeinfer_kernels.cuda.triton_ops.neuron_unpacking import (
    unpack_neuron_columns,
    unpack_neuron_rows,
)
from tests.kernels.row_matrices import random_matrix


@pytest.mark.parametrize("name", NEURON_FORMATS)
@pytest.mark.parametrize("columns", [256, 512, 1280])
def test_rows_by_neuron_are_unpacked(device: str, kernels: Kernels, name: str, columns: int) -> None:
    matrix = random_matrix(name, 5, columns)
    memory = torch.from_numpy(lay_out_rows(matrix, kernels)).to(device)[: 5 * neuron_row_bytes(matrix)]
    out = torch.full((6, columns), float("nan"), dtype=torch.float16, device=device)
    unpack_neuron_rows(memory, name, out[:5])
    assert torch.isnan(out[5]).all()
    actual = out[:5].cpu().numpy()
    np.testing.assert_allclose(actual, matrix.decoded(), rtol=1.1e-3, atol=6e-8)


@pytest.mark.parametrize("name", NEURON_FORMATS)
@pytest.mark.parametrize("outputs", [63, 256])
def test_columns_by_neuron_are_unpacked(device: str, name: str, outputs: int) -> None:
    matrix = random_matrix(name, outputs, 512)
    layout = ColumnLayout.of(matrix)
    memory = torch.from_numpy(lay_out_columns(matrix)).to(device)[: layout.nbytes]
    out = torch.full((513, layout.outputs), float("nan"), dtype=torch.float16, device=device)
    unpack_neuron_columns(memory, name, layout, out[:512])
    assert torch.isnan(out[512]).all()
    actual = out[:512, :outputs].t().cpu().numpy()
    np.testing.assert_allclose(actual, matrix.decoded(), rtol=1.1e-3, atol=6e-8)


@pytest.mark.parametrize("name", NEURON_FORMATS)
def test_columns_of_experts_are_unpacked_to_rows(device: str, name: str) -> None:
    matrices = [random_matrix(name, 128, 512, seed=seed) for seed in range(2)]
    layout = ColumnLayout.of(matrices[0])
    raw = np.concatenate([lay_out_columns(matrix)[: layout.nbytes] for matrix in matrices])
    out = torch.full((257, 512), float("nan"), dtype=torch.float16, device=device)
    unpack_neuron_columns(torch.from_numpy(raw).to(device), name, layout, out[:256], by_expert=True)
    assert torch.isnan(out[256]).all()
    expected = np.concatenate([matrix.decoded() for matrix in matrices])
    np.testing.assert_allclose(out[:256].cpu().numpy(), expected, rtol=1.1e-3, atol=6e-8)
