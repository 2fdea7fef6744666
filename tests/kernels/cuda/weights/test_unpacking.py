"""Rows in the host's layout, unpacked on the device, equal those of the file's decoder."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import interleave, kernel_format
from edgeinfer_kernels.cuda.triton_ops.unpacking import unpack
from edgeinfer_kernels.cuda.weights.plane_formats import STREAMED
from edgeinfer_kernels.matrix import Matrix
from tests.kernels.cuda.device_matrices import SOURCES, Raw, rows_from
from tests.kernels.cuda.weights.test_packing import columns_for, decoded


def unpacked(device: str, kernels: Kernels, name: str, raw: Raw, columns: int) -> Any:
    """(rows, columns) float16 by way of the host's layout; asserts that nothing else was written."""
    matrix = Matrix("test", name, len(raw), columns, raw)
    memory = torch.from_numpy(interleave(matrix, kernels)).to(device)
    groups = -(-len(raw) // 16)
    out = torch.full((16 * groups + 1, columns), float("nan"), dtype=torch.float16, device=device)
    unpack(memory, kernel_format(matrix), columns, out[:-1])
    assert torch.isnan(out[-1]).all()
    assert not out[len(raw) : -1].any()
    return out[: len(raw)].cpu().numpy()


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("source", SOURCES)
def test_unpacking_restores_every_weight(device: str, kernels: Kernels, name: str, source: str) -> None:
    rows, columns = 21, columns_for(name)
    raw = rows_from(source, name, rows, columns)
    actual = unpacked(device, kernels, name, raw, columns)
    np.testing.assert_allclose(actual, decoded(name, raw), rtol=1.1e-3, atol=6e-8)
