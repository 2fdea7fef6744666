"""The numba backend's blocks against the numpy reference, on every instruction set and thread count."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model_config.weights import read_config, read_weights, rope_factors
from edgeinfer_kernels.blocks.attention import AttentionState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.caches.state_rows import StateRows
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import UnsupportedProcessorError
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.cpu.runtime.schedule import BestTokens
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.reference import ReferenceBackend
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.conftest import (
    BEST,
    ISAS,
    PORTABLE,
    TILE_ISAS,
    best_formats,
    built_kernels,
    isas_and_formats,
)
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY, RandomModel

CONTEXT = 160
LONG = 700
IDS = np.random.default_rng(5).integers(3, VOCABULARY, 150).tolist()
Build = Callable[[DecoderSpec, DecoderWeights, DecoderState], CpuBackend | ReferenceBackend]


def engine_for(
    path: Path, build: Build, kind: CacheType = "f32", batch: int = 64, context: int = CONTEXT
) -> NativeEngine:
    file = GGUFFile.open(path)
    config = read_config(file)
    specification = config.specification(rope_factors(file, config, context))
    state = DecoderState.allocate(specification, context, kind)
    backend = build(specification, read_weights(file, config), state)
    return NativeEngine(specification, backend, context, batch)


def caches_of(engine: NativeEngine) -> list[LayerCache]:
    assert isinstance(engine.backend, CpuBackend | ReferenceBackend)
    states = engine.backend.state.blocks.values()
    return [state.cache for state in states if isinstance(state, AttentionState)]


def cpu(isa: str | None = None, threads: int = 2, repack: bool = True) -> Build:
    def build(s: DecoderSpec, w: DecoderWeights, state: DecoderState) -> CpuBackend:
        kernels = built_kernels(isa or BEST, kernel_units(w))
        in_file = [] if repack else w.matrices()
        return CpuBackend(s, w, state, kernels, CpuOptions(64, threads, in_file))

    return build


NEAR = {
    "f16": 2e-3, "f32": 5e-6, "fp8": 0.03, "q8_0": 4e-3, "q4_0": 0.02, "q8_0/q4_0": 0.02, "fp8/q8_0": 0.03
}  # fmt: skip
"""How far the kernels may be from the reference; a cache with scales is compared with one with scales, whose
elements may get the next code at the edge of a code.
"""


def _exact_kind(kind: CacheType) -> CacheType:
    return "f32" if kind == "f16" else kind


def exact(s: DecoderSpec, w: DecoderWeights, state: DecoderState) -> ReferenceBackend:
    return ReferenceBackend(s, w, state, np.float64)


def logits_of(
    path: Path, build: Build, kind: CacheType = "f32", ids: list[int] = IDS
) -> npt.NDArray[np.float32]:
    engine = engine_for(path, build, kind)
    try:
        return engine.append_all(ids)
    finally:
        engine.close()


def relative(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.default_cases
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "gemma3n", "olmo2-windows", "phi3-longrope", "starcoder2"),
        *("bitnet-scales", "gptneox", "mpt"),
    ],
)
def test_a_chunked_prefill_equals_the_reference(tmp_path: Path, isa: str, name: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    assert relative(logits_of(path, cpu(isa)), logits_of(path, exact)) < 5e-6


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_logits(tmp_path: Path, threads: int) -> None:
    path = replace(ZOO["llama"], formats=("Q8_0", "Q4_0")).write(tmp_path / "model.gguf")
    assert np.array_equal(logits_of(path, cpu(threads=threads)), logits_of(path, cpu(threads=1)))


@pytest.mark.parametrize("threads", [2, 5])
def test_chunks_that_any_thread_may_take_give_the_same_logits(tmp_path: Path, threads: int) -> None:
    """A feed-forward of more than FIXED_BYTES_PER_THREAD for each thread, and one KV head each or none."""
    model = replace(ZOO["llama"], layers=2, feed_forward=8192, formats=("Q8_0",))
    path, found = model.write(tmp_path / "model.gguf"), list[npt.NDArray[np.float32]]()
    for count in (1, threads):
        engine = engine_for(path, cpu(threads=count))
        engine.append(IDS[:20])
        found.append(np.stack([engine.append(IDS[20:21]), *engine.append_all(IDS[21:25])]))
        engine.close()
    assert np.array_equal(found[0], found[1])


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    ("name", "is_found"),
    [("llama", True), ("command-r", True), ("qwen35", True), ("gemma2", False), ("gemma3n", False)],
)
def test_the_best_tokens_are_those_of_the_logits(tmp_path: Path, name: str, is_found: bool) -> None:
    """Those of scaled ones too; where logits have a soft cap, the host finds them."""
    engine = engine_for(ZOO[name].write(tmp_path / "model.gguf"), cpu())
    assert engine.capabilities.finds_best == is_found
    for inner in ((), (1,)):  # hidden states between two layers take a step for each part
        engine.backend.keep_hidden(inner)
        for count in (1, 4, 16):
            engine.rewind(0)
            engine.append(IDS[:20])
            expected = engine.append_all(IDS[20 : 20 + count]).argmax(axis=1).tolist()
            engine.rewind(20)
            assert engine.append_best(IDS[20 : 20 + count]) == (expected if is_found else None)
            assert len(engine.ids) == 20 + count * is_found
    assert engine.append_best(IDS[:17]) is None  # too many for a step
    engine.close()


def test_the_best_tokens_of_a_tree_are_those_of_the_logits(tmp_path: Path) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu())
    engine.append(IDS[:20])
    parents = (-1, -1, 0, 2, 1, 2)
    ids = IDS[20 : 21 + len(parents)]
    assert engine.best_of_tree(ids, parents) == engine.append_tree(ids, parents).argmax(axis=1).tolist()
    engine.close()


def test_a_step_with_an_invalid_logit_is_left_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu())
    engine.append(IDS[:20])
    monkeypatch.setattr(BestTokens, "first", lambda _, count: [*range(1, count), -1])
    assert engine.append_best(IDS[20:24]) is None
    assert engine.ids == IDS[:20]
    engine.close()


def test_states_for_a_draft_head_are_those_of_the_final_norm(tmp_path: Path) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu())
    x = np.random.default_rng(3).normal(size=(6, engine.specification.hidden_size)).astype(np.float32)
    expected = engine.backend.final_norm(x)
    rows = StateRows(np.full((9, x.shape[1]), np.nan, np.float32), 0, 9)
    engine.backend.write_draft_states(x, rows[2:8])
    assert relative(rows[2:8].view, expected) < 1e-6
    engine.backend.write_draft_states(x[1:3], rows[4:6])
    assert relative(rows[4:6].view, expected[1:3]) < 1e-6
    engine.backend.write_draft_states(x[::2], rows[3:6])  # not contiguous
    assert np.array_equal(rows[3:6].view, expected[::2])
    assert np.isnan(rows.array[[0, 1, 8]]).all()
    engine.close()


@pytest.mark.parametrize(("name", "head_dim"), [("llama", 24), ("llama", 8), ("qwen3", 48), ("qwen3", 16)])
def test_rope_takes_pairs_that_fill_no_vector(tmp_path: Path, name: str, head_dim: int) -> None:
    """Adjacent pairs (llama) and those of neox, of which 8 and 16 fill a vector."""
    path = replace(ZOO[name], head_dim=head_dim).write(tmp_path / "model.gguf")
    assert relative(logits_of(path, cpu()), logits_of(path, exact)) < 5e-6


def test_one_token_at_a_time_equals_all_at_once(tmp_path: Path) -> None:
    path = ZOO["gemma2"].write(tmp_path / "model.gguf")
    engine = engine_for(path, cpu())
    together = engine.append_all(IDS)
    engine.rewind(0)
    single = np.stack([engine.append([token]) for token in IDS])
    engine.close()
    assert relative(single, together) < 1e-6


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "name", ["llama", "gemma3n", "gemma3", "qwen2moe", "deepseek2", "bloom", "falcon-40b"]
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_small_batches_equal_single_tokens_bit_for_bit(tmp_path: Path, name: str, threads: int) -> None:
    engine = engine_for(ZOO[name].write(tmp_path / "model.gguf"), cpu(threads=threads), context=LONG)
    ids = np.random.default_rng(7).integers(3, VOCABULARY, LONG).tolist()
    # Around 256 and 512 positions the sums of a token are split into more parts.
    for start in (20, 250, 506, 680):
        engine.rewind(0)
        engine.append(ids[:start])
        single = np.stack([engine.append([token]) for token in ids[start : start + 16]])
        for count in (2, 5, 8, 16):
            engine.rewind(start)
            np.testing.assert_array_equal(engine.append_all(ids[start : start + count]), single[:count])
    engine.close()


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_all_layers_in_one_call_equal_block_by_block(tmp_path: Path, name: str, threads: int) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    result = []
    for together in (True, False):
        engine = engine_for(path, cpu(threads=threads))
        backend, position = engine.backend, 0
        assert isinstance(backend, CpuBackend)
        for ids in (IDS[:5], IDS[5:6], IDS[6:22]):
            x = backend.embed(ids)
            if together:
                backend.forward(x, position)
            else:
                for index in engine.specification.indices():
                    backend.run_block(index, x, position)
            position += len(ids)
        result.append(backend.logits(x))
        engine.close()
    assert np.array_equal(result[0], result[1])


def test_positions_may_be_evaluated_again_in_any_order(tmp_path: Path) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu(), context=LONG)
    ids = np.random.default_rng(7).integers(3, VOCABULARY, 300).tolist()
    first = engine.append_all(ids)
    engine.rewind(260)
    assert relative(engine.append_all(ids[260:]), first[260:]) < 1e-6
    engine.rewind(3)
    assert relative(engine.append_all(ids[3:40]), first[3:40]) < 1e-6
    engine.close()


def test_an_f16_cache_differs_by_its_rounding_only(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "model.gguf")
    expected = logits_of(path, exact)
    assert relative(logits_of(path, cpu(), "f16"), expected) < 2e-3
    assert np.array_equal(logits_of(path, cpu(PORTABLE), "f16").shape, expected.shape)


@pytest.mark.default_cases
@pytest.mark.parametrize(("head_dim", "heads"), [(8, 6), (24, 6), (80, 6), (128, 6), (8, 4), (16, 4)])
@pytest.mark.parametrize(("name", "near"), [("F32", 5e-6), ("Q8_0", 0.05)])
def test_odd_head_dimensions_are_padded(
    tmp_path: Path, head_dim: int, heads: int, name: str, near: float
) -> None:
    model = RandomModel("qwen3", head_dim=head_dim, heads=heads, kv_heads=2, formats=(name,))
    path = model.write(tmp_path / "model.gguf")
    assert relative(logits_of(path, cpu()), logits_of(path, exact)) < near


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("isa", [BEST, PORTABLE])
@pytest.mark.parametrize("kind", NEAR)
def test_grouped_query_heads_equal_the_reference_in_fours_and_the_remainder(
    tmp_path: Path, isa: str, kind: CacheType
) -> None:
    model = RandomModel("llama", head_dim=128, heads=10, kv_heads=2)
    path = model.write(tmp_path / "model.gguf")
    result = relative(logits_of(path, cpu(isa), kind), logits_of(path, exact, _exact_kind(kind)))
    assert result < NEAR[kind]


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_split_kv_attention_equals_the_reference(tmp_path: Path, name: str, kind: CacheType) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    ids = np.random.default_rng(6).integers(3, VOCABULARY, LONG).tolist()
    result = []
    for build in (cpu(threads=5), exact):
        engine = engine_for(path, build, kind, context=LONG)
        engine.append(ids[:-3])
        result.append(np.stack([engine.append([token]) for token in ids[-3:]]))
        engine.close()
    assert relative(result[0], result[1]) < NEAR[kind]


@pytest.mark.default_cases
@pytest.mark.parametrize(
    ("kind", "code", "near", "min_distance", "max_distance"),
    [("q8_0", 0.02, 4e-3, 1e-4, 0.03), ("q4_0", 0.3, 0.03, 1e-3, 0.3)],
)
@pytest.mark.parametrize("head_dim", [8, 24, 48, 80, 96, 128])
@pytest.mark.parametrize("isa", [BEST, PORTABLE])
def test_a_quantized_cache_is_rounded_as_in_the_formula(
    tmp_path: Path,
    head_dim: int,
    isa: str,
    kind: CacheType,
    code: float,
    near: float,
    min_distance: float,
    max_distance: float,
) -> None:
    model = RandomModel("qwen3", head_dim=head_dim, heads=6, kv_heads=2)
    path = model.write(tmp_path / "model.gguf")
    ours, formula = (engine_for(path, build, kind) for build in (cpu(isa), exact))
    for engine in (ours, formula):
        engine.append(IDS[:-1])
        engine.append(IDS[-1:])
    for actual, expected in zip(caches_of(ours), caches_of(formula), strict=True):
        keys, values = actual.read(len(IDS), head_dim)
        expected_keys, expected_values = expected.read(len(IDS), head_dim)
        # At the edge of a code, the next one is possible: an element is off by one step of its group at most.
        assert np.abs(keys - expected_keys).max() <= code * np.abs(expected_keys).max()
        assert np.abs(values - expected_values).max() <= code * np.abs(expected_values).max()
        assert relative(keys, expected_keys) < near
        assert relative(values, expected_values) < near
    ours.close()
    plain = logits_of(path, exact)
    assert min_distance < relative(logits_of(path, cpu(isa), kind), plain) < max_distance


def test_odd_sizes_are_padded(tmp_path: Path) -> None:
    model = RandomModel("llama", width=60, feed_forward=100, head_dim=12, heads=5, kv_heads=1)
    path = model.write(tmp_path / "model.gguf")
    assert relative(logits_of(path, cpu()), logits_of(path, exact)) < 5e-6


@pytest.mark.parametrize(
    "formats",
    best_formats(
        [
            *(("Q2_K",), ("Q3_K",), ("IQ4_XS",), ("Q5_1",), ("MXFP4",), ("TQ1_0", "Q1_0")),
            *(("F16", "BF16", "Q5_0"), ("Q4_0", "Q6_K")),
        ]
    ),
)
def test_quantized_models_differ_by_the_rounding_of_activations_only(
    tmp_path: Path, formats: tuple[str, ...]
) -> None:
    model = replace(ZOO["llama"], width=256, feed_forward=512, layers=2, formats=formats)
    path = model.write(tmp_path / "model.gguf")
    ids = IDS[:20]
    assert relative(logits_of(path, cpu(), ids=ids), logits_of(path, exact, ids=ids)) < 0.05


@pytest.mark.parametrize(("isa", "formats"), isas_and_formats(TILE_ISAS, [("Q4_K", "Q8_0"), ("Q8_0", "F16")]))
def test_amx_is_closer_to_the_reference_than_int8_activations(
    tmp_path: Path, isa: str, formats: tuple[str, ...]
) -> None:
    model = replace(ZOO["llama"], width=256, feed_forward=512, layers=2, formats=formats)
    path = model.write(tmp_path / "model.gguf")
    expected = logits_of(path, exact)
    by_tiles = relative(logits_of(path, cpu(isa)), expected)
    assert 0 < by_tiles < relative(logits_of(path, cpu(PORTABLE)), expected)


IN_FILE = (
    *(("Q2_K", "Q3_K"), ("IQ4_XS", "IQ4_NL"), ("Q5_1", "Q4_1"), ("MXFP4", "Q8_0"), ("TQ1_0", "Q5_K")),
    *(("F16", "BF16", "Q5_0"), ("Q4_K", "Q6_K"), ("Q1_0", "Q4_0", "TQ2_0")),
)


@pytest.mark.parametrize(("isa", "formats"), isas_and_formats([BEST, PORTABLE], IN_FILE))
def test_memory_mapped_weights_give_the_same_logits(
    tmp_path: Path, formats: tuple[str, ...], isa: str
) -> None:
    model = replace(ZOO["llama"], width=256, feed_forward=512, layers=2, formats=formats)
    path = model.write(tmp_path / "model.gguf")
    ids = IDS[:20]
    result = [logits_of(path, cpu(isa, repack=repack), ids=ids) for repack in (True, False)]
    assert np.array_equal(result[0], result[1])


def test_odd_memory_mapped_rows_and_columns_are_padded(tmp_path: Path) -> None:
    model = RandomModel("llama", width=60, feed_forward=101, head_dim=12, heads=5, kv_heads=1)
    for formats in (("F32",), ("F16", "BF16")):
        path = replace(model, formats=formats).write(tmp_path / "model.gguf")
        result = [logits_of(path, cpu(repack=repack)) for repack in (True, False)]
        assert np.array_equal(result[0], result[1])


def test_repacking_is_counted_and_memory_mapping_copies_nothing(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    for repack in (True, False):
        backend = engine_for(path, cpu(repack=repack)).backend
        assert isinstance(backend, CpuBackend)
        assert (backend.repacked_bytes > 100_000, backend.repack_seconds > 0) == (repack, repack)
        in_file = [array for array in backend.decoder.arena.arrays if not array.flags.writeable]
        assert len(in_file) == (0 if repack else 3 * 7 + 1)
        backend.close()


def test_more_tokens_than_the_batch_are_refused(tmp_path: Path) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu())
    with pytest.raises(ValueError, match="65 tokens in one step; the backend was loaded for 64"):
        engine.backend.embed(IDS[:65])
    engine.close()


def test_an_instruction_set_that_the_processor_lacks_is_refused(tmp_path: Path) -> None:
    path = ZOO["llama"].write(tmp_path / "model.gguf")
    with pytest.raises(
        UnsupportedProcessorError, match=r"instruction set avx1024: this processor \(.*\) runs"
    ):
        engine_for(path, cpu("avx1024"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "qwen2moe", "smallthinker", "deepseek2"])
def test_a_whole_decode_step_equals_its_blocks_bit_for_bit(tmp_path: Path, name: str) -> None:
    engine = engine_for(ZOO[name].write(tmp_path / "model.gguf"), cpu())
    engine.append(IDS[:40])
    backend = engine.backend
    assert isinstance(backend, CpuBackend)
    x = backend.embed(IDS[40:41])
    for index in engine.specification.indices():
        backend.run_block(index, x, 40)
    expected = backend.logits(x)[0]
    first, second = backend.step_logits(IDS[40:41], 40)[0], backend.step_logits(IDS[41:42], 41)[0]
    np.testing.assert_array_equal(first, expected)
    assert not np.array_equal(first, second)
    engine.close()
