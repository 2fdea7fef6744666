"""The speed of the CPU kernels of a format, measured on the path of tokens."""

import math
from pathlib import Path

import pytest

from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import row_units
from edgeinfer_kernels.cpu.runtime.kernel_speed import kernel_speed
from edgeinfer_kernels.one_layer import WIDTH, one_layer, wide_layers


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_reading_and_prompts_have_speeds(name: str, tmp_path: Path) -> None:
    kernels = load_kernels(user_folder("cache"), choose(), row_units([name]))
    result = kernel_speed(kernels, name, threads=2, read_bytes=8 << 20, seconds=0.02)
    assert 0 < result.bytes_per_second < math.inf
    assert 0 < result.operations_per_second < math.inf


def test_the_measured_decoder_has_the_requested_head() -> None:
    specification, weights = one_layer("Q6_K", 48)
    assert (weights.output.rows, weights.output.columns) == (48, WIDTH)
    assert specification.vocabulary_size == 48
    assert {matrix.format for matrix in weights.matrices()} == {"Q6_K"}


def test_measured_layers_have_about_the_requested_bytes() -> None:
    specification, weights = wide_layers("Q4_0", 100 << 20)
    assert len(specification.layers) == 4
    assert 0.9 < sum(matrix.nbytes for matrix in weights.matrices(head=False)) / (100 << 20) < 1.1
    assert len(wide_layers("Q8_0", 1)[0].layers) == 1
