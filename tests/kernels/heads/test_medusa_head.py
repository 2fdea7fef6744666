"""Medusa heads on the CPU against the numpy formula."""

import numpy as np
import pytest

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.embedding.medusa_head import MedusaHeadSpec, MedusaHeadWeights
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder import (
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.codecs import encode
from tests.kernels.conftest import BEST, built_kernels

NORM = NormSpec("rms", 1e-5)


def matrix(random: np.random.Generator, name: str, rows: int, columns: int) -> Matrix:
    values = random.standard_normal((rows, columns)).astype(np.float32)
    raw = encode(values.reshape(-1), block_format(name)).reshape(rows, -1)
    return Matrix("m", name, rows, columns, raw)


def random_heads(
    random: np.random.Generator, name: str, width: int, rows: int, count: int = 3
) -> tuple[DecoderSpec, DecoderWeights]:
    """Heads of one format as a decoder."""
    layers, table = [], matrix(random, name, rows, width)
    for _ in range(count):
        bias = random.standard_normal(width).astype(np.float32)
        own = MedusaHeadWeights(matrix(random, name, width, width), bias, matrix(random, name, rows, width))
        layers.append(LayerWeights((ResidualWeights(own),)))
    weights = DecoderWeights(table, table.take_rows(0, 0), None, None, tuple(layers))
    layer = LayerSpec((ResidualBlock(MedusaHeadSpec(rows), NORM),))
    return DecoderSpec(width, rows, (layer,) * count, NORM, norm_name=""), weights


@pytest.mark.parametrize(("name", "width", "near"), [("F32", 60, 1e-5), ("Q8_0", 64, 0.03)])
@pytest.mark.parametrize("repack", [True, False])
def test_a_head_equals_the_formula(name: str, width: int, near: float, repack: bool) -> None:
    random, rows = np.random.default_rng(3), 97
    spec, weights = random_heads(random, name, width, rows)
    state = DecoderState.allocate(spec, 16, "f32")
    in_file = [] if repack else weights.matrices(head=False)
    options = CpuOptions(16, 2, in_file, head=False)
    kernels = built_kernels(BEST, kernel_units(weights, head=False))
    kernel = CpuBackend(spec, weights, state, kernels, options)
    formula = ReferenceBackend(spec, weights, state, np.float64)
    for tokens in (1, 5):
        states = random.standard_normal((tokens, width)).astype(np.float32)
        for head in (2, 0, 1):
            actual, expected = (backend.medusa_logits(states, head) for backend in (kernel, formula))
            assert np.abs(actual - expected).max() <= near * np.abs(expected).max()
    kernel.close()
