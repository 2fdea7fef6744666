"""Tokens of several sequences in one step: each attends to its sequence, bit for bit as if it were alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import EdgeInferError
from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import LayerCache
from edgeinfer_kernels.decoder_state import DecoderState
from tests.kernels.conftest import BEST, ISAS
from tests.kernels.cpu.test_cpu_backend import Build, cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

CONTEXT = 768
"""Not longer than the rings: the pages of several sequences don't fit those."""
RANDOM = np.random.default_rng(3)
PROMPT = RANDOM.integers(3, VOCABULARY, 290).tolist()
TAILS = [RANDOM.integers(3, VOCABULARY, count).tolist() for count in (1, 5, 20, 40)]
Logits = npt.NDArray[np.float32]


def page_tables(prompt: int) -> npt.NDArray[np.int64]:
    """Of each text: the prompt's whole pages, then separate ones, in an order without adjacent pages."""
    shared = prompt // PAGE
    own = RANDOM.permutation(np.arange(shared + 1, CONTEXT // PAGE))
    tables = np.zeros((len(TAILS), CONTEXT // PAGE), np.int64)
    tables[:, :shared] = np.arange(shared)
    tables[:, shared : shared + 4] = own[: 4 * len(TAILS)].reshape(len(TAILS), 4)
    return tables


def copy_begun_page(engine: NativeEngine, prompt: int, tables: npt.NDArray[np.int64]) -> None:
    copied = prompt // PAGE * PAGE
    for table in tables:
        engine.backend.copy_positions(copied, int(table[prompt // PAGE]) * PAGE, prompt - copied)


def together(engine: NativeEngine, prompt: int, tables: npt.NDArray[np.int64]) -> list[list[Logits]]:
    """Logits after each tail's tokens; a step takes the next token of every tail that has one."""
    backend = engine.backend
    result: list[list[Logits]] = [[] for _ in TAILS]
    for index in range(max(map(len, TAILS))):
        texts = [text for text, tail in enumerate(TAILS) if index < len(tail)]
        x = backend.embed([TAILS[text][index] for text in texts])
        backend.forward_batch(x, BatchPositions(np.full(len(texts), prompt + index), tables[texts]))
        for text, row in zip(texts, backend.logits(x), strict=True):
            result[text].append(row)
    return result


def alone(engine: NativeEngine, prompt: Sequence[int], tail: Sequence[int]) -> Logits:
    engine.rewind(0)
    engine.append(prompt)
    return np.stack([engine.append([token]) for token in tail])


def build_for(name: str, threads: int) -> Build:
    return exact if name == "reference" else cpu(name, threads)


@pytest.mark.default_cases(6)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        *(("llama", "f16"), ("llama", "q4_0"), ("gemma3", "f16"), ("qwen2moe", "f16"), ("starcoder2", "f16")),
        *(("gemma3n", "f16"), ("bloom", "f16"), ("gpt2", "q4_0")),
        *(("deepseek2", "f16"), ("deepseek2", "q4_0"), ("llama", "q8_0/q4_0"), ("llama", "fp8")),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("prompt", [17, 256, 290])
def test_sequences_with_a_shared_prefix_equal_single_sequences_bit_for_bit(
    tmp_path: Path, model: str, kind: CacheType, threads: int, prompt: int
) -> None:
    path = ZOO[model].write(tmp_path / "model.gguf")
    engine = engine_for(path, cpu(threads=threads), kind, context=CONTEXT)
    expected = [alone(engine, PROMPT[:prompt], tail) for tail in TAILS]
    engine.rewind(0)
    engine.append(PROMPT[:prompt])
    tables = page_tables(prompt)
    copy_begun_page(engine, prompt, tables)
    for own, rows in zip(expected, together(engine, prompt, tables), strict=True):
        np.testing.assert_array_equal(np.stack(rows), own)
    engine.close()


@pytest.mark.default_cases
@pytest.mark.parametrize("isa", ["reference", *ISAS])
@pytest.mark.parametrize(
    "model",
    [
        *("llama", "olmo2-windows", "deepseek2", "bloom", "gpt2"),
        pytest.param("gemma3n", marks=pytest.mark.slow),
    ],
)
def test_sequences_with_a_shared_prefix_equal_the_reference(tmp_path: Path, isa: str, model: str) -> None:
    path, prompt = ZOO[model].write(tmp_path / "model.gguf"), 37
    engine = engine_for(path, build_for(isa, 2), context=CONTEXT)
    engine.append(PROMPT[:prompt])
    tables = page_tables(prompt)
    copy_begun_page(engine, prompt, tables)
    actual = together(engine, prompt, tables)
    truth = engine_for(path, exact, context=CONTEXT)
    for rows, tail in zip(actual, TAILS, strict=True):
        assert relative(np.stack(rows), alone(truth, PROMPT[:prompt], tail)) < 5e-6
    engine.close()


@pytest.mark.parametrize("build", ["reference", BEST])
def test_a_sequence_reads_prefix_copies_of_the_same_step(tmp_path: Path, build: str) -> None:
    """Two draft tokens after one token in one step: the token's key goes to both sequences' pages."""
    path, prompt = ZOO["llama"].write(tmp_path / "model.gguf"), 21
    engine = engine_for(path, build_for(build, 2), context=CONTEXT)
    prefix, drafts = PROMPT[prompt], PROMPT[prompt + 1 : prompt + 3]
    expected = [alone(engine, PROMPT[:prompt], [prefix, draft])[-1] for draft in drafts]
    engine.rewind(prompt)
    tables = np.zeros((2, 4), np.int64)
    tables[0, :2], tables[1, :2] = (0, 1), (0, 9)
    engine.backend.copy_positions(PAGE, 9 * PAGE, prompt - PAGE)
    backend = engine.backend
    x = backend.embed([prefix, *drafts])
    copies = ((9 * PAGE + prompt - PAGE,), (), ())
    backend.forward_batch(
        x, BatchPositions(np.array([prompt, prompt + 1, prompt + 1]), tables[[0, 0, 1]], copies)
    )
    actual = backend.logits(x)[1:]
    assert relative(actual, np.stack(expected)) < 1e-12
    assert build == "reference" or np.array_equal(actual, np.stack(expected))
    engine.close()


def test_more_tokens_than_a_forward_accepts_are_refused(tmp_path: Path) -> None:
    engine = engine_for(ZOO["llama"].write(tmp_path / "model.gguf"), cpu(), context=CONTEXT)
    backend = engine.backend
    count = backend.capabilities.max_batch_tokens + 1
    x = backend.embed([3] * count)
    with pytest.raises(ValueError, match="saw a batch of 17 tokens, wanted 16 at most, or a chunk of one"):
        backend.forward_batch(x, BatchPositions(np.zeros(count, np.int64), np.zeros((count, 4), np.int64)))
    engine.close()


@pytest.mark.parametrize(
    ("source", "target", "count"), [(16, 48, 16), (32, 96, 37), (21, 60, 3), (14, 35, 20)]
)
def test_positions_are_copied_from_any_page(source: int, target: int, count: int) -> None:
    cache = LayerCache(
        RANDOM.standard_normal((2, 12, 32, PAGE)).astype(np.float16),
        RANDOM.standard_normal((2, 12 * PAGE, 32)).astype(np.float16),
    )
    keys, values = (np.array(read) for read in cache.read(12 * PAGE, 32))
    cache.copy(source, target, count)
    for before, after in zip((keys, values), cache.read(12 * PAGE, 32), strict=True):
        before[:, target : target + count] = before[:, source : source + count].copy()
        np.testing.assert_array_equal(after, before)


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", ["f16", "f32", "fp8", "q8_0", "q4_0", "q8_0/q4_0"])
@pytest.mark.parametrize("model", ["llama", "qwen2moe", "deepseek2", "bloom"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("lengths", [(64, 64, 37), (17, 5, 64), (40, 16, 2)])
def test_chunks_of_a_prompt_in_pages_equal_those_of_contiguous_positions(
    tmp_path: Path, model: str, kind: CacheType, threads: int, lengths: tuple[int, ...]
) -> None:
    path = ZOO[model].write(tmp_path / "model.gguf")
    engine = engine_for(path, cpu(threads=threads), kind, context=CONTEXT)
    pages = np.random.default_rng(4).permutation(CONTEXT // PAGE)[: -(-sum(lengths) // PAGE)]
    start = 0
    expected, actual = [], []
    for length in lengths:
        engine.append(PROMPT[start : start + length - 1])
        expected.append(engine.append(PROMPT[start + length - 1 : start + length]))
        start += length
    engine.rewind(0)
    start = 0
    for length in lengths:
        engine.append_chunk(PROMPT[start : start + length - 1], start, pages)
        last = engine.append_chunk(PROMPT[start + length - 1 : start + length], start + length - 1, pages)
        actual.append(engine.last_logits(last))
        start += length
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("model", ["llama", "deepseek2"])
def test_pages_are_copied_as_if_at_once(tmp_path: Path, model: str, kind: CacheType) -> None:
    """Two pages change places, and a third is copied."""
    path = ZOO[model].write(tmp_path / "model.gguf")
    engine, other = (engine_for(path, cpu(), kind, context=CONTEXT) for _ in range(2))
    for each in (engine, other):
        each.append(PROMPT[: 4 * PAGE])
    engine.backend.copy_pages([0, 2, 3], [2, 0, 9])
    pages = np.array([2, 1, 0, 9])
    x = engine.append_chunk([7], 4 * PAGE - 1, pages)
    other.rewind(4 * PAGE - 1)
    np.testing.assert_array_equal(engine.last_logits(x), other.append([7]))


@pytest.mark.parametrize("model", ["llama", "lfm2", "gemma3", "qwen35"])
@pytest.mark.parametrize("build", [exact, cpu()], ids=["reference", "cpu"])
def test_states_of_the_same_weights_are_separate(tmp_path: Path, model: str, build: Build) -> None:
    engine = engine_for(ZOO[model].write(tmp_path / "model.gguf"), build, "f32")
    other = engine.with_state(DecoderState.allocate(engine.specification, CONTEXT, "f32"))
    prompts, results = (PROMPT[:30], PROMPT[100:140]), []
    for each, ids in zip((engine, other), prompts, strict=True):
        results.append(np.stack([each.append(ids), *(each.append([token]) for token in PROMPT[200:210])]))
        each.rewind(0)
    logits: list[list[Logits]] = [[], []]
    for index, (each, ids) in enumerate(zip((engine, other), prompts, strict=True)):
        logits[index].append(each.append(ids))
    for token in PROMPT[200:210]:
        for index, each in enumerate((engine, other)):
            logits[index].append(each.append([token]))
    for actual, expected in zip(logits, results, strict=True):
        np.testing.assert_array_equal(actual, expected)
    engine.others = (other,)
    engine.close()
    with pytest.raises(EdgeInferError, match="closed"):
        other.append([5])
