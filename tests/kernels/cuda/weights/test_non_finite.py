"""NaN and infinity among a file's scales, found on the device while its weights are packed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import edgeinfer
from edgeinfer_kernels.cuda.weights.packing import has_non_finite
from edgeinfer_kernels.cuda.weights.plane_formats import TILES
from edgeinfer_quant_formats import FormatError, block_format
from edgeinfer_quant_formats.formats import FORMATS
from tests.edgeinfer.loading.test_non_finite_weights import MATRIX, model_file
from tests.kernels.cuda.device_matrices import normal_rows
from tests.kernels.cuda.offload.conftest import small_gpu  # noqa: F401  # a fixture


@pytest.mark.parametrize("name", [name for name in TILES if FORMATS[name].scales])
def test_every_scale_of_a_block_is_checked(device: str, name: str) -> None:
    form = block_format(name)
    field = form.scales
    assert field is not None
    columns = 2 * max(form.block_elements, 32)
    raw = normal_rows(name, 6, columns)
    assert not has_non_finite(torch.from_numpy(raw.copy()).to(device), name)
    for number in range(field.count):
        damaged = raw.copy()
        first = raw.shape[1] - form.block_bytes + field.offset + field.unit * number
        damaged[3, first : first + field.unit] = np.frombuffer(
            field.exponent.to_bytes(field.unit, "little"), np.uint8
        )
        assert has_non_finite(torch.from_numpy(damaged).to(device), name)


def test_scales_that_are_always_finite_are_not_checked(device: str) -> None:
    raw = torch.full((2, block_format("NVFP4").block_bytes), 255, dtype=torch.uint8, device=device)
    assert not has_non_finite(raw, "NVFP4")


def test_a_damaged_file_is_refused(tmp_path: Path, small_gpu: Callable[[int], None]) -> None:  # noqa: F811
    small_gpu(1 << 30)
    path = model_file(tmp_path, "Q8_0")
    with pytest.raises(FormatError, match=f"^{MATRIX}: NaN or infinity in its scales, wanted finite numbers"):
        edgeinfer.load(path, context=64, draft=None)
