"""Steps of several sequences in pages of the cache, and chunks of prompts in pages, against the reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.engine.device_sampling import BatchSampling
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.options import SamplingParams
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import independent_tokens, is_chunk
from tests.edgeinfer.generation.batching.live_engines import Run, prompt, request
from tests.edgeinfer.generation.batching.test_shared_drafts import Oracle
from tests.edgeinfer.speculation.test_drafting import draft_always
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, FLOATS_AGREE, Decoder, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

DEVICE = "cuda" if HAS_GPU else "cpu"
PAGES = [[2], [3, 0], [1]]
"""Of each sequence."""
LENGTHS = [15, 21, 14]
"""Tokens of each sequence; the last three are read in batches."""
BATCHED = 3
COUNTS = {"f16": (3, 7, 1), "q8_0": (3, 7, 1), "q4_0": (2, 5, 1)}
"""Tokens of each sequence in one batch, by the type of the KV cache."""
Row = np.ndarray[Any, np.dtype[np.float64]]
AGREE = {"f16": FLOATS_AGREE, "q8_0": FLOATS_AGREE, "q4_0": 2 * FLOATS_AGREE}
"""By the type of the KV cache: a value near the middle of two codes of q4_0 may get either."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "llama": (ZOO["llama"], (0, 1)),
    "windows, norms of heads": (ZOO["gemma3"], (4, 5)),
    "sinks, experts": (ZOO["gpt-oss"], (0, 1)),
    "experts": (ZOO["qwen3moe"], (0, 1)),
    "ALiBi": (ZOO["bloom"], (0,)),
    "learned positions": (ZOO["gpt2"], (0, 1)),
    "latent attention": (ZOO["deepseek2"], (0, 1)),
    "norms of rows": (ZOO["olmo2"], (0, 1)),
}


SINGLE: tuple[tuple[str, CacheType], ...] = (
    *(("llama", kind) for kind in ("f16", "q8_0", "q4_0")),
    *(("latent attention", kind) for kind in ("f16", "q8_0", "q4_0")),
    ("windows, norms of heads", "q8_0"),
    ("sinks, experts", "q4_0"),
)
"""Each kernel that reads pages with each type of the cache; the test of several tokens has all models."""


def table(pages: Sequence[int], columns: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array([*pages, *[0] * (columns - len(pages))], np.int64)


def read_prompts(
    backend: CudaBackend, texts: Sequence[Sequence[int]], left: Sequence[int] = 3 * (BATCHED,)
) -> None:
    """All but the last tokens of each text: a chunk of the prompt's kernels, and one of a step."""
    for text, pages, count in zip(texts, PAGES, left, strict=True):
        end, start = len(text) - count, 0
        for count in (end - 2, 2):
            positions = np.arange(start, start + count)
            rows = np.broadcast_to(table(pages), (count, len(pages)))
            backend.forward_batch(backend.embed(text[start : start + count]), BatchPositions(positions, rows))
            start += count


def relative(row: Row, wanted: Row) -> float:
    return float(np.linalg.norm(row - wanted) / np.linalg.norm(wanted))


def expected_rows(decoder: Decoder, texts: Sequence[Sequence[int]], kind: CacheType) -> list[list[Row]]:
    """The reference's for float16; quantized caches round what differs in the last bit, so those of the same
    kernels with one text in the cache.
    """
    if kind == "f16":
        return [list(decoder.reference_logits(text)[-BATCHED:]) for text in texts]
    backend = decoder.backend(DEVICE, kv=kind)
    rows = []
    for text in texts:
        end = len(text) - BATCHED
        result = read(backend, text, (end - 2, 2, *[1] * BATCHED))
        rows.append([result[at] for at in range(end, len(text))])
    backend.close()
    return rows


def rows_of_one_step(
    decoder: Decoder, texts: Sequence[Sequence[int]], kind: CacheType, last: Sequence[int]
) -> list[Row]:
    """As `expected_rows`, of the `last` tokens of each text, which are read in one step."""
    if kind == "f16":
        return [
            row
            for text, count in zip(texts, last, strict=True)
            for row in decoder.reference_logits(text)[-count:]
        ]
    backend, rows = decoder.backend(DEVICE, kv=kind, step_tokens=16), list[Row]()
    for text, count in zip(texts, last, strict=True):
        end = len(text) - count
        read(backend, text[:end], (end - 2, 2))
        x = backend.embed(text[end:])
        backend.forward(x, end)
        rows += list(backend.logits(x).astype(np.float64))
    backend.close()
    return rows


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("model", "kind"), SINGLE)
def test_each_token_of_a_batch_attends_to_its_sequence(tmp_path: Path, model: str, kind: CacheType) -> None:
    of, layers = MODELS[model]
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder:
        ids = decoder.ids(sum(LENGTHS))
        texts = [ids[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]
        backend = decoder.backend(DEVICE, kv=kind)
        assert backend.capabilities.max_batch_tokens
        read_prompts(backend, texts)
        columns = max(map(len, PAGES))
        pages = np.stack([table(each, columns) for each in PAGES])
        expected = expected_rows(decoder, texts, kind)
        for step in range(BATCHED):
            positions = np.array([len(text) - BATCHED + step for text in texts])
            x = backend.embed([text[position] for text, position in zip(texts, positions, strict=True)])
            backend.forward_batch(x, BatchPositions(positions, pages))
            logits = backend.logits(x).astype(np.float64)
            for row, of_text in zip(logits, expected, strict=True):
                assert relative(row, of_text[step]) < AGREE[kind]
        backend.close()


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("model", "kind"), [*((model, "f16") for model in MODELS), ("llama", "q8_0"), ("llama", "q4_0")]
)
def test_a_step_of_a_batch_takes_several_tokens_of_a_sequence(
    tmp_path: Path, model: str, kind: CacheType
) -> None:
    """Drafts: each token attends to those before it. One of three sequences has one token, and one crosses a
    page. With four bits they take several steps.
    """
    of, layers = MODELS[model]
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder:
        ids = decoder.ids(sum(LENGTHS))
        texts = [ids[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]
        backend, counts = decoder.backend(DEVICE, kv=kind, step_tokens=16), COUNTS[kind]
        read_prompts(backend, texts, counts)
        rows = [
            (text, len(texts[text]) - count + step)
            for text, count in enumerate(counts)
            for step in range(count)
        ]
        pages = np.stack([table(PAGES[text], 2) for text, _ in rows])
        batch = BatchPositions(np.array([position for _, position in rows]), pages)
        assert len(independent_tokens(batch)) == max(counts)
        widths: list[int] = []
        launch = backend.step.launch

        def counted(tokens: int) -> None:
            widths.append(tokens)
            launch(tokens)

        setattr(backend.step, "launch", counted)  # noqa: B010
        x = backend.embed([texts[text][position] for text, position in rows])
        backend.forward_batch(x, batch)
        if not HAS_GPU:  # graphs are launched without it
            assert len(widths) == (max(counts) if kind == "q4_0" else 1)
        expected = rows_of_one_step(decoder, texts, kind, counts)
        for row, wanted in zip(backend.logits(x).astype(np.float64), expected, strict=True):
            assert relative(row, wanted) < AGREE[kind]
        backend.close()


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_copied_pages_hold_the_same_positions(tmp_path: Path, kind: CacheType) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        ids, backend = decoder.ids(20), decoder.backend(DEVICE, kv=kind)
        expected = read(backend, ids, (16, 2, 1, 1))
        backend.forward(backend.embed(ids[:16]), 0)
        backend.forward(backend.embed(ids[16:18]), 16)
        backend.copy_pages([0, 1], [1, 3])
        x = backend.embed(ids[18:19])
        backend.forward_batch(x, BatchPositions(np.array([18]), table([1, 3])[None, :]))
        assert relative(backend.logits(x)[0].astype(np.float64), expected[18]) < FLOATS_AGREE
        backend.copy_positions(3 * PAGE, 2 * PAGE, 3)
        x = backend.embed(ids[19:])
        backend.forward_batch(x, BatchPositions(np.array([19]), table([1, 2])[None, :]))
        assert relative(backend.logits(x)[0].astype(np.float64), expected[19]) < FLOATS_AGREE
        backend.close()


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_pages_that_were_read_to_main_memory_are_written_back(tmp_path: Path, kind: CacheType) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        ids, backend = decoder.ids(19), decoder.backend(DEVICE, kv=kind)
        expected = read(backend, ids, (16, 2, 1))
        kept = backend.read_pages([1, 0])
        backend.forward(backend.embed(ids[3:19]), 0)
        backend.write_pages([2, 1], kept)
        backend.forward(backend.embed(ids[3:19]), 0)
        x = backend.embed(ids[18:])
        backend.forward_batch(x, BatchPositions(np.array([18]), table([1, 2])[None, :]))
        assert relative(backend.logits(x)[0].astype(np.float64), expected[18]) < FLOATS_AGREE
        backend.close()


def test_padding_of_a_batch_writes_to_no_page(tmp_path: Path) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        ids, backend = decoder.ids(14), decoder.backend(DEVICE)
        expected = decoder.reference_logits(ids)
        backend.forward(backend.embed(ids[:13]), 0)
        pages = np.array([[1], [2], [3]])
        backend.forward_batch(backend.embed(ids[:3]), BatchPositions(np.array([0, 0, 0]), pages))
        x = backend.embed(ids[13:])
        backend.forward(x, 13)
        assert relative(backend.logits(x)[0].astype(np.float64), expected[13]) < FLOATS_AGREE
        backend.close()


@pytest.mark.slow
def test_tokens_of_a_batch_are_sampled_as_by_the_host(tmp_path: Path) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        vocabulary, backend = decoder.specification.vocabulary_size, decoder.backend(DEVICE)
        ids = [token % vocabulary for token in decoder.ids(3)]
        settings = [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.5, top_k=20, seed=4),
            SamplingParams(temperature=0.8, repeat_penalty=1.5, seed=5),
        ]
        samplers = [Sampler(each, vocabulary, None) for each in settings]
        again = [Sampler(each, vocabulary, None) for each in settings]
        positions = BatchPositions(np.zeros(3, np.int64), np.array([[1], [2], [3]]))
        for _ in range(4):
            x = backend.embed(ids)
            backend.forward_batch(x, positions)
            rows = {row: (sampler, ids) for row, sampler in enumerate(samplers)}
            sampled = BatchSampling(backend).sample(x, rows)
            logits = backend.logits(x)
            expected = {row: each.sample(logits[row], ids) for row, each in enumerate(again)}
            assert sampled == expected
        backend.close()


@pytest.mark.slow
def test_a_step_that_was_started_ahead_gives_the_same_tokens(tmp_path: Path) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        vocabulary, pages = decoder.specification.vocabulary_size, np.array([[1], [2], [3]])
        first = [token % vocabulary for token in decoder.ids(3)]

        def run(ahead: bool, changed_at: int = -1) -> tuple[list[list[int]], int]:
            """The greedy tokens of five steps, and the number of launched steps."""
            backend, ids, launched = decoder.backend(DEVICE), first, 0
            launch = backend.step.launch

            def counted(tokens: int) -> None:
                nonlocal launched
                launched += 1
                launch(tokens)

            backend.step.launch = counted  # type: ignore[method-assign, assignment]
            results = []
            for position in range(5):
                x = backend.embed(ids)
                backend.forward_batch(x, BatchPositions(np.full(3, position), pages))
                following = BatchPositions(np.full(3, position + 1), pages) if ahead else None
                requests = [backend.sampling_request(SamplingParams(temperature=0.0), 0, 0.0)] * 3
                ids = backend.sample_batch(x, requests, [(), (), ()], following)
                if position == changed_at:
                    ids = [(ids[0] + 1) % vocabulary, *ids[1:]]
                results.append(ids)
            backend.close()
            return results, launched

        assert run(ahead=True)[0] == run(ahead=False)[0]
        assert run(ahead=True, changed_at=2)[0] == run(ahead=False, changed_at=2)[0]
        if not HAS_GPU:  # graphs are launched without it
            assert [run(ahead=True)[1], run(ahead=True, changed_at=2)[1]] == [6, 7]


@pytest.mark.slow
def test_requests_on_a_gpu_share_its_cache(tmp_path: Path) -> None:
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:

        def run(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
            backend = decoder.backend(DEVICE)
            together = Run(NativeEngine(decoder.specification, backend, CONTEXT, 16))
            assert isinstance(together.scheduler.requests, PagedRequests)
            result = together.finish({0: [request(each, 5) for each in prompts]})
            backend.close()
            return result

        prompts = [prompt(12), prompt(7, 1), [*prompt(12), *prompt(3, 2)]]
        prompts = [[token % decoder.specification.vocabulary_size for token in each] for each in prompts]
        assert run(prompts) == [run([each])[0] for each in prompts]


@pytest.mark.slow
def test_drafts_of_requests_on_a_gpu_change_no_ids(tmp_path: Path) -> None:
    """The drafts of greedy requests are verified there; a request with logprobs needs the logits."""
    with opened(replace(ZOO["llama"], formats=("F32",)), tmp_path, (0, 1)) as decoder:
        prompts = [
            [token % decoder.specification.vocabulary_size for token in prompt(*each)]
            for each in ((12,), (7, 1))
        ]

        def run(drafter: Drafter | None, logprobs: int | None = None) -> tuple[list[list[int]], int]:
            backend = decoder.backend(DEVICE)
            engine = NativeEngine(decoder.specification, backend, CONTEXT, 16)
            speculator = Speculator(engine, drafter) if drafter is not None else None
            if speculator is not None:
                draft_always(speculator.batched, 3)
            together = Run(engine, speculator)
            wanted = [request(prompts[0], 9), request(prompts[1], 9, logprobs=logprobs)]
            ids = together.finish({0: wanted[:1], 1: wanted[1:]})
            accepted = sum(live.drafts.accepted for live in together.live)
            backend.close()
            return ids, accepted

        expected, _ = run(None)
        oracle = Oracle([[*ids, *more] for ids, more in zip(prompts, expected, strict=True)])
        assert run(oracle)[0] == run(oracle, logprobs=1)[0] == expected
        assert run(oracle)[1] > 4


def test_a_chunk_differs_from_a_batch() -> None:
    same = np.broadcast_to(table([4, 7]), (3, 2))
    assert is_chunk(BatchPositions(np.array([5, 6, 7]), same))
    assert not is_chunk(BatchPositions(np.array([5, 7, 8]), same))
    assert not is_chunk(BatchPositions(np.array([5, 6]), np.array([[4, 7], [5, 7]])))


def test_recurrent_states_have_no_pages(tmp_path: Path) -> None:
    with opened(replace(ZOO["qwen35"], formats=("F32",)), tmp_path) as decoder:
        backend = decoder.backend(DEVICE)
        assert not backend.capabilities.max_batch_tokens
        backend.close()
