"""Steps of nine to sixteen tokens: of one sequence, and of as many sequences in pages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, Logits, opened, read, worst
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

DEVICE = "cuda" if HAS_GPU else "cpu"
QUANTS_AGREE = 0.05
"""Quantized weights: activations are rounded to eight bits, and a difference in float16 may change a code."""
QUANTIZED = ("Q4_K", "Q6_K", "Q4_0", "Q8_0")
WIDE = RandomModel("llama", width=256, heads=4, kv_heads=2, head_dim=64, feed_forward=256, formats=QUANTIZED)
MODELS: dict[str, tuple[RandomModel, tuple[int, ...], float]] = {
    "floats": (replace(ZOO["llama"], formats=("F32",)), (0, 1), FLOATS_AGREE),
    "quantized": (WIDE, (0, 1), QUANTS_AGREE),
    "windows, norms after blocks": (replace(ZOO["gemma3"], formats=("Q8_0",)), (4, 5), QUANTS_AGREE),
    "experts": (replace(ZOO["qwen3moe"], formats=("Q8_0",)), (0, 1), QUANTS_AGREE),
    "latent attention": (replace(ZOO["deepseek2"], dense_layers=3, formats=("Q8_0",)), (0, 1), QUANTS_AGREE),
    "delta nets": (replace(ZOO["qwen35"], formats=("Q8_0",)), (0, 3), QUANTS_AGREE),
}


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, "f16") for model in MODELS),
        *((model, "q8_0") for model in ("quantized", "latent attention")),
    ],
)
def test_a_step_of_thirteen_tokens_equals_steps_of_few(tmp_path: Path, model: str, kind: str) -> None:
    """After cached tokens, with three tokens of padding; the step after it reads what it has appended.

    With rounded keys the router of the experts selects others for a token, so they have one cache only.
    """
    of, layers, tolerance = MODELS[model]
    with opened(of, tmp_path, layers) as decoder:
        ids, results = decoder.ids(31), []
        for counts in ((17, 13, 1), (17, 8, 5, 1)):
            backend = decoder.backend(DEVICE, chunk=17, kv=kind, step_tokens=MAX_TOKENS)
            results.append(read(backend, ids, counts, expected=13))
            backend.close()
        expected = np.stack([results[1].get(at, results[0][max(at, 4)]) for at in range(31)])
        assert worst(results[0], expected) < (tolerance if kind == "f16" else 2 * tolerance)


def test_a_step_with_a_cache_in_four_bits_has_eight_tokens(tmp_path: Path) -> None:
    with opened(WIDE, tmp_path, (0,)) as decoder:
        for kind, most in (("f16", 16), ("q4_0", 8), ("q8_0/q4_0", 8)):
            backend = decoder.backend(DEVICE, chunk=17, kv=kind, step_tokens=MAX_TOKENS)
            assert [backend.embed(decoder.ids(count)).in_step for count in (8, 9, 16)] == [
                True, most > 8, most > 8
            ]  # fmt: skip
            backend.close()


def batch_logits(backend: CudaBackend, ids: Sequence[int], pages: Sequence[int]) -> Logits:
    """The logits of tokens that each begin a sequence in a page."""
    x = backend.embed(ids)
    backend.forward_batch(x, BatchPositions(np.zeros(len(ids), np.int64), np.array(pages)[:, None]))
    return backend.logits(x).astype(np.float64)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_sixteen_sequences_in_one_step_have_the_logits_of_each_alone(tmp_path: Path, model: str) -> None:
    of, layers, tolerance = MODELS[model]
    with opened(of, tmp_path, layers) as decoder:
        backend = decoder.backend(DEVICE, context=16 * (MAX_TOKENS + 1), step_tokens=MAX_TOKENS)
        if not backend.capabilities.max_batch_tokens:
            backend.close()
            return
        assert backend.capabilities.max_batch_tokens == MAX_TOKENS
        ids, pages = decoder.ids(MAX_TOKENS), list(range(MAX_TOKENS))
        together = batch_logits(backend, ids, pages)
        for row in (0, 7, 8, 15):
            alone = batch_logits(backend, ids[row : row + 1], pages[row : row + 1])[0]
            assert np.linalg.norm(together[row] - alone) < tolerance * np.linalg.norm(alone), row
        backend.close()
