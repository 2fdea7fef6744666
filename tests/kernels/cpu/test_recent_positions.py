"""Recent positions in f16 next to a cache of fewer bits: every token reads them, however its step is made."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.blocks.attention import AttentionState
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionState
from edgeinfer_kernels.caches.cache_formats import hadamard_rows
from edgeinfer_kernels.caches.cache_state import CacheState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import LayerCache, by_position
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.main_memory import MainMemoryBackend
from tests.kernels.conftest import ISAS
from tests.kernels.cpu.test_batch_positions import (
    PROMPT,
    TAILS,
    alone,
    copy_begun_page,
    page_tables,
    together,
)
from tests.kernels.cpu.test_cpu_backend import cpu, engine_for, exact, relative
from tests.kernels.cpu.test_joined_states import joined_engine, one_by_one
from tests.kernels.cpu.test_joined_states import together as joined_together
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT = 768
CHUNKS = (1, 64, 33, 16, 1, 64, 7, 64, 2)
RANDOM = np.random.default_rng(8)
IDS = RANDOM.integers(3, VOCABULARY, 270).tolist()
WITHIN = 2e-4
"""Sums over other tiles of positions are rounded differently, which may give the next float16."""
Logits = npt.NDArray[np.float32]


def engine_of(path: Path, kind: CacheType, isa: str | None = None, threads: int = 2) -> NativeEngine:
    return engine_for(path, cpu(isa, threads), kind, context=CONTEXT)


def logits_of(engine: NativeEngine, ids: list[int], sizes: tuple[int, ...] = CHUNKS) -> Logits:
    """Logits after every token, in chunks of these sizes, then token by token."""
    rows, done, left = [], 0, iter(sizes)
    while done < len(ids):
        some = ids[done : done + next(left, 1)]
        rows.append(engine.append_all(some))
        done += len(some)
    return np.concatenate(rows)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "deepseek2", "bloom", "gpt-oss"])
@pytest.mark.parametrize("isa", ISAS)
def test_with_all_positions_in_f16_nothing_changes(tmp_path: Path, name: str, isa: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    plain, recent = (logits_of(engine_of(path, kind, isa), IDS) for kind in ("f16", "f16+f16"))
    assert relative(recent, plain) < WITHIN


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["llama", "deepseek2"])
def test_the_last_two_pages_and_the_own_one_are_read_in_f16_all_others_in_four_bits(
    tmp_path: Path, name: str
) -> None:
    """The reference on a cache with these keys and values gives the same logits."""
    path = ZOO[name].write(tmp_path / "model.gguf")
    engine, end = engine_of(path, "q4_0+f16"), 109
    engine.append(IDS[:end])
    truth = engine_for(path, exact, "f32", context=CONTEXT)
    truth.append(IDS[:1])
    copy_caches(engine, truth, end, end // PAGE - 2)
    expected, coarse = truth_logits(truth, end), engine_of(path, "q4_0")
    coarse.append(IDS[:end])
    actual = engine.append([IDS[end]])
    assert relative(actual, expected) < 1e-3
    assert relative(coarse.append([IDS[end]]), expected) > 5e-3


def truth_logits(truth: NativeEngine, end: int) -> Logits:
    x = truth.backend.embed([IDS[end]])
    truth.backend.forward(x, end)
    logits: Logits = truth.backend.logits(x)[0]
    return logits


def copy_caches(engine: NativeEngine, truth: NativeEngine, end: int, page: int) -> None:
    """Write the positions before `page` as the engine's caches have them to those of `truth`, and the other
    ones from the recent positions.
    """
    assert isinstance(engine.backend, MainMemoryBackend)
    assert isinstance(truth.backend, MainMemoryBackend)
    state, target = engine.backend.state, truth.backend.state
    assert state.recent is not None
    slots = state.recent.table[page : end // PAGE + 1]
    for index, block in state.blocks.items():
        to = target.blocks[index]
        assert isinstance(block, AttentionState | LatentAttentionState)
        assert isinstance(to, CacheState)
        cache, other = block.cache, to.cache
        if isinstance(cache, LayerCache):
            assert isinstance(block, AttentionState)
            head_dim, recent = block.spec.head_dim, cache.recent
            assert recent is not None
            keys, values = (rows.swapaxes(0, 1) for rows in cache.read(page * PAGE, head_dim))
            near_keys = by_position(recent.keys[:, slots])[:, :, :head_dim].swapaxes(0, 1)
            near = recent.values.reshape(len(recent.values), -1, PAGE, recent.values.shape[2])[:, slots]
            near_values = (
                near.reshape(len(near), -1, near.shape[3])[:, :, :head_dim].swapaxes(0, 1).astype(np.float32)
            )
            other.write(0, keys, values)
            other.write(page * PAGE, hadamard_rows(near_keys), hadamard_rows(near_values))
        else:
            assert cache.recent is not None
            rows = cache.recent.rows.reshape(-1, PAGE, cache.recent.rows.shape[2])[slots]
            near = rows.reshape(-1, rows.shape[2])[:, : cache.cached_dim]
            other.write(0, cache.read(0, page * PAGE))
            other.write(page * PAGE, cache.hadamard(near.astype(np.float32)))


def test_short_steps_give_the_logits_of_single_tokens_bit_for_bit(tmp_path: Path) -> None:
    path, ids = ZOO["llama"].write(tmp_path / "model.gguf"), IDS[:140]
    one, several = (engine_of(path, "q4_0+f16") for _ in range(2))
    np.testing.assert_array_equal(logits_of(several, ids, (16, 5, 16, 2, 9, 16, 11)), logits_of(one, ids, ()))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek2"])
def test_rewinds_of_the_last_tokens_keep_the_recent_positions(tmp_path: Path, name: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    engine, other = (engine_of(path, "q4_0+f16") for _ in range(2))
    engine.append(IDS[:150])
    other.append(IDS[:150])
    expected = np.stack([engine.append([token]) for token in IDS[150:170]])
    other.append(IDS[200:216])
    other.rewind(150)
    np.testing.assert_array_equal(np.stack([other.append([token]) for token in IDS[150:170]]), expected)


def test_positions_before_a_far_rewind_are_read_in_four_bits(tmp_path: Path) -> None:
    path, kept = ZOO["llama"].write(tmp_path / "model.gguf"), 80
    engine, fresh, coarse = (engine_of(path, kind) for kind in ("q4_0+f16", "q4_0+f16", "q4_0"))
    engine.append(IDS)
    engine.rewind(kept)
    for each in (fresh, coarse):
        each.append(IDS[:kept])
    rewound, whole, four_bits = (each.append([IDS[kept]]) for each in (engine, fresh, coarse))
    assert 0 < relative(rewound, whole) < relative(four_bits, whole) * 2
    later = [each.append(IDS[kept : kept + 64]) for each in (engine, fresh)]
    assert relative(*later) < relative(rewound, whole)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "deepseek2"])
@pytest.mark.parametrize("prompt", [17, 290])
def test_sequences_in_one_step_equal_each_alone_bit_for_bit(tmp_path: Path, name: str, prompt: int) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    engine = engine_of(path, "q4_0+f16")
    expected = [alone(engine, PROMPT[:prompt], tail) for tail in TAILS]
    file_engine = engine_of(path, "f32")
    state = DecoderState.allocate(file_engine.specification, CONTEXT, "q4_0+f16", sequences=len(TAILS) + 1)
    pooled = file_engine.with_state(state)
    pooled.append(PROMPT[:prompt])
    tables = page_tables(prompt)
    copy_begun_page(pooled, prompt, tables)
    for own, rows in zip(expected, together(pooled, prompt, tables), strict=True):
        np.testing.assert_array_equal(np.stack(rows), own)


def test_a_step_of_more_sequences_than_have_recent_positions_reads_four_bits(tmp_path: Path) -> None:
    path, prompt, count = ZOO["llama"].write(tmp_path / "model.gguf"), 160, 12
    coarse, engine = (engine_of(path, kind) for kind in ("q4_0", "q4_0+f16"))
    coarse.append(PROMPT[:prompt])
    engine.backend.restore(coarse.backend.snapshot(prompt), prompt)
    tables = np.tile(np.arange(11), (count, 1))
    tables[:, 8:] = np.arange(11, 11 + 3 * count).reshape(count, 3)
    rows = []
    for backend in (coarse.backend, engine.backend):
        for table in tables:
            backend.copy_pages([8, 9], table[8:10].tolist())
        x = backend.embed(IDS[:count])
        backend.forward_batch(x, BatchPositions(np.full(count, prompt), tables))
        rows.append(backend.logits(x))
    np.testing.assert_array_equal(rows[1], rows[0])


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("model", ["gemma3", "lfm2", "gpt-oss"])
def test_separate_states_of_one_step_have_their_recent_positions(tmp_path: Path, model: str) -> None:
    path, build = ZOO[model].write(tmp_path / "model.gguf"), cpu(threads=2)
    engine = joined_engine(path, build, "q4_0+f16")
    np.testing.assert_array_equal(joined_together(engine), one_by_one(path, build, "q4_0+f16"))


def test_evicted_texts_and_restored_snapshots_continue_alike_from_four_bits(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "model.gguf")
    engine, other = (engine_of(path, "q4_0+f16") for _ in range(2))
    engine.append(IDS[:200])
    engine.evict(range(4, 100))
    other.append(IDS[:130])
    other.backend.restore([array.copy() for array in engine.backend.snapshot(104)], 104)
    other.rewind(104)
    for token in IDS[200:250]:
        np.testing.assert_array_equal(engine.append([token]), other.append([token]))
