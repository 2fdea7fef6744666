"""Attention whose programs have the queries of several tokens equals that with programs of each token."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks import attention
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, Decoder, Logits, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

DEVICE = "cuda" if HAS_GPU else "cpu"
CODES_AGREE = 0.05
"""A difference in float16 may change a code of the cache."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "gates of elements": (ZOO["qwen35"], (3,)),
    "softplus gates of heads": (ZOO["laguna"], (1,)),
    "sinks, windows": (ZOO["gpt-oss"], (0, 1)),
    "norms of results": (ZOO["bitnet"], (0,)),
    "heads of 64": (RandomModel("llama", width=256, heads=4, kv_heads=1, head_dim=64), (0,)),
}


def logits_of(decoder: Decoder, kind: CacheType) -> dict[int, Logits]:
    """The logits of a prompt and of steps, each with more positions than the one before it."""
    backend = decoder.backend(DEVICE, chunk=17, kv=kind, step_tokens=MAX_TOKENS if kind == "f16" else 8)
    counts = (17, 3, 1, 13) if kind == "f16" else (17, 3, 1, 8)
    result = read(backend, decoder.ids(sum(counts)), counts, expected=13)
    backend.close()
    return result


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *((model, "f16") for model in MODELS),
        ("heads of 64", "q8_0"),
        ("gates of elements", "q4_0"),
        ("sinks, windows", "q4_0"),
    ],
)
def test_programs_of_several_tokens_equal_those_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kind: CacheType
) -> None:
    """In four bits the Hadamard transform of one row has other roundings than that of several, so that later
    codes of the cache differ.
    """
    of, layers = MODELS[model]
    tolerance = CODES_AGREE if kind == "q4_0" else FLOATS_AGREE if HAS_GPU else 0.0
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder:
        monkeypatch.setattr(attention, "MAX_REREAD", 0)
        together = logits_of(decoder, kind)
        monkeypatch.setattr(attention, "MAX_REREAD", 1 << 30)
        monkeypatch.setattr(attention, "APART_TOKENS", MAX_TOKENS)
        separate = logits_of(decoder, kind)
    for at, logits in together.items():
        distance = abs(separate[at] - logits).max()
        assert distance <= tolerance * abs(logits).max(), (at, distance)
