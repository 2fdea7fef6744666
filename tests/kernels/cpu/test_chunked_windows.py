"""Windows that are chunks: the kernels equal the formula, which is that of llama.cpp."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.temperature import Temperature
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.reference.blocks.attention import attend
from tests.kernels.conftest import BEST, ISAS
from tests.kernels.cpu.test_cpu_backend import IDS, cpu, engine_for, exact
from tests.model_zoo import ZOO

NORM = NormSpec("rms", 1e-5)
CHUNKS = (1, 31, 2, 17, 16, 1, 40, 42)


def with_chunks(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Let files of Llama 4 have shorter chunks than theirs of 8192 positions."""
    monkeypatch.setitem(ARCHITECTURES, "llama4", replace(ARCHITECTURES["llama4"], chunk_window=length))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("length", [1, 16, 37])
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_equal_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, kind: CacheType, length: int
) -> None:
    with_chunks(monkeypatch, length)
    path = ZOO["llama4"].write(tmp_path / "model.gguf")
    expected = engine_for(path, exact, kind).append_all(IDS)
    engine = engine_for(path, cpu(isa), kind)
    done, rows = 0, []
    for count in CHUNKS:
        rows.append(engine.append_all(IDS[done : done + count]))
        done += count
    assert done == len(IDS)
    error = np.linalg.norm(np.concatenate(rows) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < (5e-6 if kind == "f32" else 4e-3)


def test_a_short_chunk_changes_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ZOO["llama4"].write(tmp_path / "model.gguf")
    plain = engine_for(path, cpu(BEST)).append_all(IDS[:40])
    with_chunks(monkeypatch, 37)
    chunked = engine_for(path, cpu(BEST)).append_all(IDS[:40])
    np.testing.assert_array_equal(plain[:36], chunked[:36])
    assert not np.allclose(plain[37], chunked[37])


def test_the_first_token_of_a_chunk_reads_its_own_value() -> None:
    spec = AttentionSpec(2, 1, 4, 0.5, NORM, None, window=3, chunked=True)
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, 1, 9, 4))
    out = attend(random.standard_normal((9, 2, 4)), keys, values, 0, spec)
    for position in (0, 3, 6):
        np.testing.assert_allclose(out[position], np.repeat(values[:, position], 2, axis=0))


def test_temperatures_begin_before_a_chunk_does() -> None:
    temperature = Temperature(0.1, length=4, offset=1)
    factors = 1 + 0.1 * np.log([1, 1, 1, 2, 2, 2, 2, 3])
    np.testing.assert_allclose(temperature.factors(np.arange(8)), factors)
    np.testing.assert_allclose(temperature.table(8), factors[[0, 3, 7]], rtol=1e-6)
