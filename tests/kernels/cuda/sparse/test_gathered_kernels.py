"""Down by neuron on a GPU: the columns of listed neurons are added up, and only those are read."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.cpu.layout.neuron_layout import ColumnLayout, lay_out_columns
from edgeinfer_kernels.cuda.sparse.gather_kernels import (
    gathered_down_kernel,
    list_active_kernel,
    sum_parts_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import WordsConfig
from edgeinfer_kernels.cuda.triton_ops.neuron_unpacking import ColumnOffsets
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.gathered_neurons import GATHERED_FORMATS
from tests.kernels.cuda.device_matrices import PLANES, activation_planes, relative, values_read
from tests.kernels.row_matrices import random_matrix

SEGMENT, OUTPUTS, NEURONS = 512, 256, 1024
Rows = npt.NDArray[np.float32]


def hidden_rows(tokens: int, active: float, seed: int = 3) -> Rows:
    """Activations of which this share isn't zero, with groups of sixteen without any."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, NEURONS)).astype(np.float32)
    x[random.random(x.shape) >= active] = 0
    x[:, 64:128] = 0
    return x


def listed(device: str, x: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of `list_active_kernel`; what it leaves is -1 or NaN."""
    planes, segments = torch.from_numpy(activation_planes(x)).to(device), NEURONS // SEGMENT
    neurons = torch.full((NEURONS,), -1, dtype=torch.int32, device=device)
    counts = torch.full((segments,), -1, dtype=torch.int32, device=device)
    values = torch.full((len(x), NEURONS), float("nan"), device=device)
    list_active_kernel[(segments,)](
        planes, neurons, counts, values, COUNT=NEURONS, HIDDEN=WordsConfig(planes.shape[2], PLANES),
        TOKENS=len(x), SEGMENT=SEGMENT, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    return neurons, counts, values


def gathered(device: str, matrix: Matrix, x: Rows, memory: npt.NDArray[np.uint8] | None = None) -> Rows:
    """(tokens, outputs): the sums over the active neurons of each row."""
    layout, (neurons, counts, values) = ColumnLayout.of(matrix), listed(device, x)
    raw = lay_out_columns(matrix)[: layout.nbytes] if memory is None else memory
    parts = torch.full((len(counts), len(x), layout.outputs), float("nan"), device=device)
    gathered_down_kernel[(layout.outputs // 128, len(counts))](
        torch.from_numpy(raw).to(device), neurons, counts, values, parts, OFFSETS=ColumnOffsets.of(layout),
        FORMAT=matrix.format, TOKENS=len(x), SEGMENT=SEGMENT, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    y = torch.full((len(x), layout.outputs), float("nan"), device=device)
    sum_parts_kernel[(layout.outputs // 16,)](
        parts, y, y, len(counts), y.stride(0), OUTPUTS=layout.outputs, TOKENS=len(x), BIAS=False,
        DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    return np.asarray(y.cpu().numpy())


@pytest.mark.parametrize(("tokens", "active"), [(1, 0.1), (3, 0.3), (4, 1.0), (2, 0.0)])
def test_active_neurons_are_listed_in_order(device: str, tokens: int, active: float) -> None:
    x = hidden_rows(tokens, active)
    neurons, counts, values = (each.cpu().numpy() for each in listed(device, x))
    exact = values_read("Q4_0", x)
    for segment in range(NEURONS // SEGMENT):
        here = slice(segment * SEGMENT, (segment + 1) * SEGMENT)
        expected = segment * SEGMENT + np.nonzero((exact[:, here] != 0).any(0))[0]
        count = counts[segment]
        assert count == len(expected)
        assert np.array_equal(neurons[here][:count], expected)
        np.testing.assert_allclose(values[:, here][:, :count], exact[:, expected], rtol=1e-6)


@pytest.mark.parametrize(("tokens", "active"), [(1, 0.1), (3, 0.3), (1, 1.0), (2, 0.0)])
@pytest.mark.parametrize("name", GATHERED_FORMATS)
@pytest.mark.default_cases(5)
def test_sums_of_gathered_columns_equal_the_decoded_weights(
    device: str, name: str, tokens: int, active: float
) -> None:
    matrix, x = random_matrix(name, OUTPUTS, NEURONS), hidden_rows(tokens, active)
    expected = values_read("Q4_0", x) @ matrix.decoded().astype(np.float64).T
    assert relative(gathered(device, matrix, x), expected) < 3e-6


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", GATHERED_FORMATS)
def test_columns_of_inactive_neurons_have_no_effect(device: str, name: str) -> None:
    matrix, x = random_matrix(name, OUTPUTS, NEURONS), hidden_rows(1, 1.0)
    x[:, ::2] = 0
    layout = ColumnLayout.of(matrix)
    raw = lay_out_columns(matrix)[: layout.nbytes].copy()
    expected = gathered(device, matrix, x, raw)
    blocks = raw.reshape(-1, layout.super_bytes)[:, layout.super_factor_bytes :]
    blocks = blocks.reshape(-1, layout.blocks_per_super, layout.block_bytes)[:, :, layout.factor_bytes :]
    blocks.reshape(*blocks.shape[:2], 32, layout.neuron_bytes)[:, :, ::2] ^= 255
    assert np.array_equal(gathered(device, matrix, x, raw), expected)
