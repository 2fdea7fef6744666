"""Rows of the file that a kernel decodes, as they come, against the codecs."""

from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.layer_output_kernels import SENT, TABLE, per_layer_inputs_kernel
from edgeinfer_kernels.cuda.triton_ops.raw_rows import raw_config
from edgeinfer_quant_formats import decode
from edgeinfer_quant_formats.formats import FORMATS, KERNEL_FORMATS
from tests.kernels.cuda.device_matrices import Raw, random_bits

TOKENS, LAYERS, WIDTH = 3, 4, 128
COLUMNS = LAYERS * WIDTH


def decoded_by_the_kernel(
    device: str, name: str, raw: Raw, ids: list[int] | None = None
) -> npt.NDArray[np.float32]:
    """The per-layer inputs of hidden states that are zero: the rows alone. `ids`: those of a table."""
    zeros, ones = torch.zeros((TOKENS, COLUMNS), device=device), torch.ones(COLUMNS, device=device)
    out = torch.empty_like(zeros)
    per_layer_inputs_kernel[(LAYERS, TOKENS)](
        zeros, COLUMNS, ones, torch.from_numpy(raw).to(device),
        torch.tensor(ids or [0], dtype=torch.int32, device=device), None, NormArgs(ones, ones, 1e-6), out,
        1.0, sqrt(2), WIDTH=WIDTH, BLOCK=WIDTH, RAW=raw_config(name, COLUMNS), SCALED=False,
        ROWS=SENT if ids is None else TABLE, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    return np.asarray(out.cpu().numpy())


@pytest.mark.parametrize("name", [name for name in KERNEL_FORMATS if name not in ("MXFP4", "NVFP4")])
def test_a_kernel_decodes_rows_of_the_file(device: str, name: str) -> None:
    raw = random_bits(name, TOKENS, COLUMNS)
    expected = decode(raw.reshape(-1), name).reshape(TOKENS, COLUMNS)
    np.testing.assert_allclose(decoded_by_the_kernel(device, name, raw), expected, rtol=2e-6, atol=1e-6)


def test_the_host_decodes_grids_and_scales_that_are_of_one_byte() -> None:
    weights = {name for name, spec in FORMATS.items() if spec.codes or spec.grid}
    left = {name for name in weights if raw_config(name, COLUMNS) is None}
    assert {"MXFP4", "NVFP4", "IQ2_XXS"} <= left
    assert not left & {"Q4_0", "Q6_K", "IQ4_XS"}


def test_a_kernel_reads_the_rows_of_tokens_from_a_table(device: str) -> None:
    table, ids = random_bits("Q4_K", 7, COLUMNS), [6, 0, 3]
    result = decoded_by_the_kernel(device, "Q4_K", table, ids)
    np.testing.assert_array_equal(result, decoded_by_the_kernel(device, "Q4_K", table[ids]))
