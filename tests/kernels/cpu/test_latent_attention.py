"""Latent attention on the CPU against the reference; steps, chunks, splits, rewinds and snapshots."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.caches.cache_types import CacheType
from tests.kernels.conftest import BEST, ISAS, PORTABLE
from tests.kernels.cpu.test_cpu_backend import IDS, NEAR, cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_latents import latent_layers, without_rope
from tests.random_models import VOCABULARY, RandomModel

DENSE = replace(ZOO["deepseek2"], layers=2, dense_layers=2)
"""Without experts, which would change at near-ties."""
LONG_IDS = np.random.default_rng(6).integers(3, VOCABULARY, 400).tolist()
CONTEXT = 512


def written(tmp_path: Path, model: RandomModel = DENSE) -> Path:
    return model.write(tmp_path / "model.gguf")


@pytest.mark.default_cases
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["deepseek2", "deepseek2-lite"])
def test_a_chunked_prefill_equals_the_reference(tmp_path: Path, isa: str, name: str) -> None:
    path = written(tmp_path, ZOO[name])
    actual, expected = (engine_for(path, build).append_all(IDS) for build in (cpu(isa), exact))
    assert relative(actual, expected) < 5e-6


@pytest.mark.default_cases
@pytest.mark.parametrize("isa", [BEST, PORTABLE])
@pytest.mark.parametrize("kind", ["f16", "f32", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("threads", [1, 3])
def test_steps_with_kv_splits_equal_the_reference(
    tmp_path: Path, isa: str, kind: CacheType, heads: int, threads: int
) -> None:
    path = written(tmp_path, replace(DENSE, heads=heads))
    tested, truth = (engine_for(path, build, kind, context=CONTEXT) for build in (cpu(isa, threads), exact))
    for engine in (tested, truth):
        engine.append(LONG_IDS[:300])
    for first, last in ((300, 301), (301, 304), (304, 320)):
        actual, expected = (engine.append_all(LONG_IDS[first:last]) for engine in (tested, truth))
        assert relative(actual, expected) < NEAR[kind]
    tested.close()


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", ["f16", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize(("width", "heads"), [(96, 5), (512, 4)])
def test_other_lengths_of_latent_vectors_equal_the_reference(
    tmp_path: Path, kind: CacheType, width: int, heads: int
) -> None:
    path = written(tmp_path, replace(DENSE, width=width, heads=heads, hybrid=latent_layers()))
    tested, truth = (engine_for(path, build, kind) for build in (cpu(), exact))
    actual, expected = (
        np.concatenate([engine.append_all(IDS[:90]), engine.append_all(IDS[90:93])])
        for engine in (tested, truth)
    )
    assert relative(actual, expected) < NEAR[kind]
    tested.close()


def test_the_last_elements_may_have_no_rope(tmp_path: Path) -> None:
    path = written(tmp_path)
    builds = [lambda s, w, state, build=build: build(without_rope(s), w, state) for build in (cpu(), exact)]
    actual, expected = (engine_for(path, build).append_all(IDS) for build in builds)
    assert relative(actual, expected) < 5e-6
    assert relative(actual, engine_for(path, exact).append_all(IDS)) > 0.01


@pytest.mark.default_cases
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("formats", [("F32",), ("Q8_0",)])
def test_small_batches_equal_single_tokens_bit_for_bit(
    tmp_path: Path, threads: int, formats: tuple[str, ...]
) -> None:
    engine = engine_for(
        written(tmp_path, replace(DENSE, formats=formats)), cpu(threads=threads), context=CONTEXT
    )
    engine.append(LONG_IDS[:200])
    single = np.stack([engine.append([token]) for token in LONG_IDS[200:216]])
    for width in range(2, 9):
        engine.rewind(200)
        parts = [
            engine.append_all(LONG_IDS[first : min(first + width, 216)]) for first in range(200, 216, width)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), single)
    engine.close()


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_chunks_of_any_size_equal_one_batch(tmp_path: Path, kind: CacheType) -> None:
    engine = engine_for(written(tmp_path), cpu(), kind, context=CONTEXT)
    expected = engine.append_all(IDS)
    for size in (1, 17, 64):
        engine.rewind(0)
        parts = [engine.append_all(IDS[first : first + size]) for first in range(0, len(IDS), size)]
        assert relative(np.concatenate(parts), expected) < 1e-5
    engine.close()


@pytest.mark.parametrize("kind", ["f16", "fp8", "q8_0", "q4_0"])
@pytest.mark.parametrize("end", [1, 77, 150])
def test_a_restored_snapshot_continues_as_before(tmp_path: Path, kind: CacheType, end: int) -> None:
    path = written(tmp_path)
    first, second = (engine_for(path, cpu(), kind) for _ in range(2))
    first.append(IDS)
    arrays = [np.array(array) for array in first.backend.snapshot(end)]
    first.rewind(end)
    second.backend.restore(arrays, end)
    x = second.backend.embed([7])
    second.backend.forward(x, end)
    np.testing.assert_array_equal(second.backend.logits(x)[-1], first.append([7]))
    first.close()
    second.close()


@pytest.mark.parametrize("heads", [4, 5])
def test_memory_mapped_weights_give_the_same_logits(tmp_path: Path, heads: int) -> None:
    path = written(tmp_path, replace(DENSE, heads=heads, formats=("Q8_0",)))
    engines = [engine_for(path, cpu(repack=repack)) for repack in (True, False)]
    for first in range(0, len(IDS), 20):  # of repacked weights, AMX multiplies more tokens at once
        repacked, mapped = (engine.append_all(IDS[first : first + 20]) for engine in engines)
        np.testing.assert_array_equal(mapped, repacked)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["f16", "fp8", "q8_0", "q4_0"])
def test_attention_scores_equal_the_weights_of_the_reference(tmp_path: Path, kind: CacheType) -> None:
    path = written(tmp_path)
    engine = engine_for(path, cpu(), kind)
    engine.append(IDS[:60])
    backend = engine.backend
    scores = backend.attention_scores(backend.embed(IDS[60:64]), 60)
    # Every head of four tokens and two layers distributes a weight of 1.
    assert scores.sum() == pytest.approx(4 * DENSE.heads * DENSE.layers, rel=1e-4)
    truth = engine_for(path, cpu(), "f32")
    truth.append(IDS[:60])
    expected = truth.backend.attention_scores(truth.backend.embed(IDS[60:64]), 60)
    assert relative(scores, expected) < {"f16": 1e-3, "fp8": 0.1, "q8_0": 0.02, "q4_0": 0.2}[kind]
    engine.close()
    truth.close()


def test_all_uses_of_separate_positions_are_possible(tmp_path: Path) -> None:
    path = written(tmp_path)
    for build in (cpu(), exact):
        engine = engine_for(path, build)
        can = engine.backend.capabilities
        assert can.can_evict
        assert can.skips_layers
        assert can.max_batch_tokens > 0
        engine.close()
