"""Batches of a split model: steps of several sequences in pages on both devices, against the reference."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.joined_requests import JoinedRequests
from edgeinfer.generation.batching.paged_requests import PagedRequests
from edgeinfer.planning.parallel_sequences import STATE_QUEUE
from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.kernels.cuda.decode.test_batches import BATCHED, LENGTHS, PAGES, relative, table
from tests.kernels.cuda.decoders import opened
from tests.kernels.cuda.offload.test_split_backend import (
    TOLERANCE,
    Divide,
    attention_alone,
    layers_for,
    mixed,
    model_for,
    split_halves,
)
from tests.kernels.cuda.split_decoders import split_decoder
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

DECIDED = (0, 2)
"""Seeds of prompts after which no two tokens are nearly as probable."""
CASES = [
    ("llama", mixed),
    ("llama", split_halves),
    ("deepseek2", attention_alone),
    ("qwen2moe", split_halves),
]


def read_prompts(backend: SplitBackend, texts: Sequence[Sequence[int]]) -> None:
    """All but the last tokens of each text, in chunks of a prompt's kernels and of a step's."""
    for text, pages in zip(texts, PAGES, strict=True):
        end, start = len(text) - BATCHED, 0
        for count in (end - 2, 2):
            x = backend.embed(text[start : start + count])
            positions = np.arange(start, start + count)
            rows = np.broadcast_to(table(pages), (count, len(pages)))
            backend.forward_batch(x, BatchPositions(positions, rows))
            start += count


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("stream", [None, 6], ids=["on the CPU", "streamed"])
@pytest.mark.parametrize(("name", "split_rule"), CASES)
def test_tokens_of_a_split_batch_attend_to_their_sequences(
    device: str, kernels: Kernels, tmp_path: Path, name: str, split_rule: Divide, stream: int | None
) -> None:
    with opened(model_for(name, split_rule), tmp_path, layers_for(name, split_rule)) as decoder:
        splits = [split_rule(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(sum(LENGTHS))
        texts = [ids[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]
        expected = [decoder.reference_logits(text) for text in texts]
        pages = np.stack([table(each, max(map(len, PAGES))) for each in PAGES])
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=stream) as backend:
            assert backend.capabilities.max_batch_tokens
            read_prompts(backend, texts)
            for step in range(BATCHED):
                positions = np.array([len(text) - BATCHED + step for text in texts])
                x = backend.embed([text[at] for text, at in zip(texts, positions, strict=True)])
                backend.forward_batch(x, BatchPositions(positions, pages))
                logits = backend.logits(x)
                for row, wanted, at in zip(logits, expected, positions, strict=True):
                    assert relative(row.astype(np.float64), wanted[at]) < TOLERANCE
            contents = backend.read_pages([0, 1, 2, 3])
            assert {len(parts) for parts in contents} == {2}
            backend.write_pages([3, 2, 1, 0], contents)
            backend.forward_batch(x, BatchPositions(positions, 3 - pages))
            np.testing.assert_array_equal(backend.logits(x), logits)


@pytest.mark.parametrize("name", ["lfm2", "gemma3"])
def test_a_split_model_with_states_or_rings_has_no_batches(
    device: str, kernels: Kernels, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.kernels.cuda.split_decoders.CONTEXT", 2048)
    with opened(model_for(name, mixed), tmp_path, layers_for(name, mixed)) as decoder:
        splits = [mixed(decoder, index) for index in range(len(decoder.weights.layers))]
        with split_decoder(decoder, device, splits, kernels) as backend:
            assert backend.capabilities.max_batch_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "missing"), [("llama", 0), ("llama", 1), ("gemma3", 0)])
def test_requests_on_a_gpu_run_together(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    missing: int,
) -> None:
    path = replace(ZOO[name], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    context = 1000 if name == "gemma3" else 64
    small_gpu(1 << 40)
    monkeypatch.setattr(CudaBackend, "warm_up", lambda *_: None)
    options: dict[str, Any] = {"context": context, "threads": 1, "draft": None}
    with edgeinfer.load(path, **options, parallel=2) as model:
        assert model.plan is not None
        nbytes = model.plan.bytes_on("gpu")
    small_gpu(nbytes - missing)
    prompts = [np.random.default_rng(seed).integers(3, VOCABULARY, 20).tolist() for seed in DECIDED]
    with edgeinfer.load(path, **options, parallel=2) as model:
        assert model.plan is not None
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, SplitBackend) == bool(missing)
        assert isinstance(model.completer.scheduler.requests, PagedRequests)
        assert (model.parallel, model.plan.options.whole_caches) == (2, name == "gemma3")
        together = [each.ids for each in model.generate(prompts, max_tokens=4, temperature=0.0)]
        again = model.generate([*prompts[0], *together[0], 5], max_tokens=2, temperature=0.0)
        assert again.speed.cached_tokens >= PAGE
    with edgeinfer.load(path, **options, device="cpu") as model:
        alone = [model.generate(prompt, max_tokens=4, temperature=0.0).ids for prompt in prompts]
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3next", "jamba-moe"])
def test_recurrent_requests_of_a_split_model_share_steps_if_all_states_are_on_the_gpu(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = replace(ZOO[name], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    monkeypatch.setattr(CudaBackend, "warm_up", lambda *_: None)
    options: dict[str, Any] = {"context": 64, "threads": 1, "draft": None}
    with edgeinfer.load(path, **options, parallel=2) as model:
        assert model.plan is not None
        nbytes = model.plan.bytes_on("gpu")
    small_gpu(nbytes - 1)
    prompts = [np.random.default_rng(seed).integers(3, VOCABULARY, 20).tolist() for seed in DECIDED]
    with edgeinfer.load(path, **options, parallel=2) as model:
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, SplitBackend)
        assert isinstance(model.completer.scheduler.requests, JoinedRequests)
        assert model.plan is not None
        assert {layer.attention for layer in model.plan.layers} == {"gpu"}
        assert (model.parallel, STATE_QUEUE in model.details) == (2, False)
        assert model.engine.backend.gpu_shard.nbytes <= model.plan.bytes_on("gpu") < nbytes
        together = [each.ids for each in model.generate(prompts, max_tokens=4, temperature=0.0)]
        alone = [model.generate(prompt, max_tokens=4, temperature=0.0).ids for prompt in prompts]
        again = model.generate([*prompts[0], *together[0], 5], max_tokens=2, temperature=0.0)
        assert again.speed.cached_tokens >= len(prompts[0])
    assert together == alone
