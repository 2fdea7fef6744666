"""Tests that need a GPU: freed memory, replayed graphs, the same text as the CPU."""

import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import JITFunction

import edgeinfer
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.tuning.step_shapes import RowKernel, Shape, Tuning
from edgeinfer_kernels.cuda.tuning.step_timer import StepTimer
from edgeinfer_kernels.cuda.tuning.tuner import RejectedCandidateError, tune
from edgeinfer_kernels.sizes.cuda_buffers import ALL_STEP_SIZES, COMMON_STEP_SIZES, MAX_TOKENS
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, Decoder, opened, read, sample_greedy, worst
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")]
MIB = 1 << 20
ADDING: tuple[RowKernel, ...] = ("output", "down")
WIDE = 1 << 20
"""Tokens of a chunk with which a small model uses more than a gibibyte."""


def free_bytes() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@pytest.fixture
def decoder(tmp_path: Path) -> Iterator[Decoder]:
    with opened(replace(ZOO["qwen3"], formats=("Q8_0", "Q4_0")), tmp_path) as result:
        yield result


def use(backend: CudaBackend, ids: list[int]) -> None:
    """A prompt, steps of two sizes and samples: everything that allocates memory."""
    read(backend, ids, (12, 1, 2))
    sample_greedy(backend, ids[0], 15, True)


def warmed_up_free_bytes(decoder: Decoder, ids: list[int]) -> int:
    """Free bytes after a backend was used and closed.

    The first use loads kernels and the workspaces of GPU libraries, which a closed backend keeps.
    """
    backend = decoder.backend("cuda")
    use(backend, ids)
    backend.close()
    del backend
    return free_bytes()


def test_closing_frees_the_memory(decoder: Decoder) -> None:
    ids = decoder.ids(16)
    baseline = warmed_up_free_bytes(decoder, ids)
    backend = decoder.backend("cuda", chunk=WIDE)
    use(backend, ids)
    assert baseline - free_bytes() > 512 * MIB
    backend.close()
    assert abs(baseline - free_bytes()) < 64 * MIB


def test_repeated_use_does_not_grow_memory(decoder: Decoder) -> None:
    ids = decoder.ids(16)
    backend = decoder.backend("cuda")
    use(backend, ids)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        use(backend, ids)
    assert torch.cuda.memory_allocated() == before
    backend.close()


def test_a_failed_allocation_reports_requested_and_free_bytes(decoder: Decoder) -> None:
    baseline, chunk = warmed_up_free_bytes(decoder, decoder.ids(16)), WIDE
    while decoder.counted_bytes("cuda", chunk=chunk) < torch.cuda.mem_get_info()[1]:
        chunk *= 2
    requested = decoder.counted_bytes("cuda", chunk=chunk) / MIB
    with pytest.raises(MemoryError) as caught:
        decoder.backend("cuda", chunk=chunk)
    reported = re.search(r"needs (\d+) MiB and the GPU has (\d+) MiB free", str(caught.value))
    assert reported is not None
    assert abs(int(reported[1]) - requested) <= 1
    assert 0 < int(reported[2]) < requested
    del caught
    small = decoder.backend("cuda")
    small.close()
    assert abs(baseline - free_bytes()) < 64 * MIB


def step_logits(backend: CudaBackend, ids: list[int], count: int, how: str) -> Any:
    """Logits of the first `count` tokens, by a graph or by launches."""
    x = backend.embed(ids[:count])
    if how == "graph":
        backend.forward(x, 0)
    else:
        backend.steps.set_state(ids[:count], 0)
        backend.step.launches.dependent = (
            how == "dependent launches" and torch.cuda.get_device_capability() >= (9, 0)
        )
        backend.step.launch(count)
    return backend.logits(x)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n", "starcoder2"])
def test_a_graph_and_single_launches_give_the_same_bits(tmp_path: Path, name: str) -> None:
    with opened(replace(ZOO[name], formats=("Q8_0", "Q4_0")), tmp_path) as decoder:
        ids, backend = decoder.ids(MAX_TOKENS), decoder.backend("cuda", step_tokens=MAX_TOKENS)
        backend.warm_up(ALL_STEP_SIZES)
        for count in ALL_STEP_SIZES:
            first = step_logits(backend, ids, count, "graph")
            for how in ("graph", "launches", "dependent launches", "graph"):
                np.testing.assert_array_equal(step_logits(backend, ids, count, how), first, err_msg=how)
        backend.close()


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "gemma3n", "qwen3moe", "deepseek2"),
        *("qwen35", "nemotron_h_moe-latent", "rwkv7", "jamba-moe"),
    ],
)
@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_captured_chunks_and_launched_ones_give_the_same_bits(
    tmp_path: Path, name: str, kind: CacheType
) -> None:
    with opened(replace(ZOO[name], formats=("Q8_0", "Q4_0")), tmp_path) as decoder:
        ids, chunks, backend = decoder.ids(48), (16, 16, 11, 5), decoder.backend("cuda", kv=kind)
        prefill = backend._parts.prefill
        captured, prefill._captured = prefill._captured, None
        launched = read(backend, ids, chunks, expected=16)
        prefill._captured = captured
        for _ in range(3):
            assert backend.rewind(0) == 0
            replayed = read(backend, ids, chunks, expected=16)
            for position, logits in launched.items():
                np.testing.assert_array_equal(replayed[position], logits, err_msg=str(position))
        assert captured is not None
        assert [kind for kind, graph in captured._graphs.items() if graph] == [(16, False), (11, False)]
        backend.close()


@pytest.mark.parametrize("widths", [COMMON_STEP_SIZES, ALL_STEP_SIZES])
def test_no_step_waits_for_a_compiler_or_a_graph(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...]
) -> None:
    ids, backend = decoder.ids(MAX_TOKENS), decoder.backend("cuda", step_tokens=MAX_TOKENS)
    backend.warm_up(widths)
    memory = torch.cuda.memory_allocated()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("made while a step was waiting")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    expected = decoder.reference_logits(ids)
    for count in ALL_STEP_SIZES:
        result = step_logits(backend, ids, count, "graph")
        for position in range(count):
            distance = np.linalg.norm(result[position] - expected[position]) / np.linalg.norm(
                expected[position]
            )
            assert distance < ROUNDING
    sample_greedy(backend, ids[0], 8, True)
    del result
    assert torch.cuda.memory_allocated() == memory
    backend.close()


def test_a_hundred_replays_give_the_same_bits(decoder: Decoder) -> None:
    ids, backend = decoder.ids(8), decoder.backend("cuda")
    for count in (1, 4):
        first = step_logits(backend, ids, count, "graph")
        for _ in range(100):
            np.testing.assert_array_equal(step_logits(backend, ids, count, "graph"), first)
    backend.close()


def test_a_tuned_step_is_no_slower_and_gives_the_same_logits(decoder: Decoder) -> None:
    ids, backend = decoder.ids(12), decoder.backend("cuda")
    before = read(backend, ids, (10, 1, 1))
    tuned = tune(StepTimer(backend.step), Tuning(), 5.0)
    assert tuned.trials > 0
    assert tuned.seconds <= tuned.seconds_before * 1.02
    backend.close()
    again = decoder.backend("cuda", tuning=tuned.tuning)
    after = read(again, ids, (10, 1, 1))
    again.close()
    for position, logits in before.items():
        assert np.linalg.norm(after[position] - logits) < 0.02 * np.linalg.norm(logits)


def test_a_step_of_more_threads_than_a_program_can_have_is_rejected(decoder: Decoder) -> None:
    backend = decoder.backend("cuda")
    timer = StepTimer(backend.step)
    assert 0 < timer(Tuning(), 1) < 0.1
    assert 0 < timer(Tuning(), 4) < 0.1
    with pytest.raises(RejectedCandidateError):
        timer(Tuning().with_row_shape(1, "qkv", Shape(64, 64)), 1)
    backend.close()


@pytest.mark.parametrize("warps", [1, 8, 32])
def test_threads_that_hold_the_same_element_continue_with_the_same_value(tmp_path: Path, warps: int) -> None:
    shape = Shape(64, warps)
    tuning = Tuning()
    for tokens, kernel in product((1, 2, 4), ADDING):
        tuning = tuning.with_row_shape(tokens, kernel, shape)
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(44)
        expected = decoder.reference_logits(ids)
        backend = decoder.backend("cuda", tuning=tuning, chunk=40)
        for _ in range(10):
            assert worst(read(backend, ids, (38, 2, 1, 3), expected=3), expected) < FLOATS_AGREE
        backend.close()


@pytest.mark.parametrize("name", ["arcee", "qwen35-draft-head"])
def test_nothing_is_captured_after_a_model_with_a_draft_head_is_loaded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_head = ZOO.get(name) or RandomModel(name, layers=1, draft_head=True)
    path = replace(with_head, formats=("Q8_0",)).write(tmp_path / "model.gguf")
    options: dict[str, Any] = {"device": "cuda", "context": 256, "draft": "mtp", "draft_tree_width": 3}
    with edgeinfer.load(path, **options) as model:
        monkeypatch.setattr(torch.cuda, "graph", _no_capture)
        for length in (1, 3, 7):
            for nodes in (0, 4, 9, 15):
                if nodes:
                    always_tree(model, length, nodes)
                else:
                    always_draft(model, length)
                completion = model.generate([5, 9, 30, 7, length, nodes], max_tokens=24, temperature=0.0)
                assert completion.speed.accepted_share is not None


def _no_capture(*_: Any, **__: Any) -> None:
    raise AssertionError("a graph is captured")


PROMPT = "Once upon a time"
ROUNDING = 0.05
"""Distance of the two devices' logits over their length: both quantize activations, in different groups."""


def test_the_built_in_model_generates_the_same_story_up_to_a_near_tie(
    record_property: Callable[[str, object], None],
) -> None:
    settings: dict[str, Any] = {"context": 512, "draft": None}
    with edgeinfer.load(device="cpu", **settings) as cpu, edgeinfer.load(device="cuda", **settings) as gpu:
        prompt = cpu.tokenizer.encode(PROMPT, bos=True)
        texts = [model.generate(prompt, max_tokens=200, temperature=0.0).ids for model in (cpu, gpu)]
        same = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), None)
        ids = [*prompt, *texts[0][:same]]
        cpu_logits, gpu_logits = (np.asarray(model.logits(ids), np.float64)[-1] for model in (cpu, gpu))
    distance = np.linalg.norm(cpu_logits - gpu_logits) / np.linalg.norm(cpu_logits)
    assert distance < ROUNDING
    if same is None:
        assert len(texts[0]) == len(texts[1])
        return
    margin = cpu_logits[texts[0][same]] - cpu_logits[texts[1][same]]
    record_property("stories part", f"at token {same}, by {margin:.4f}; logits differ by {distance:.2%}")
    # the second device prefers another token by no more than the difference of their logits
    assert 0 <= margin <= 2 * np.abs(cpu_logits - gpu_logits).max()
