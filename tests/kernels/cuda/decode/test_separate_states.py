"""Sequences whose recurrent states are separate: their steps alone and together, against the reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.joined_requests import JoinedRequests
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.edgeinfer.generation.batching.live_engines import Run, request
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import CONTEXT, FLOATS_AGREE, Decoder, Logits, opened, read
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

DEVICE = "cuda" if HAS_GPU else "cpu"
SEQUENCES = 3
LENGTHS = (23, 27, 24)
"""Tokens of each sequence; the last ones are read together."""
TOGETHER = 3
AGREE = 2 * FLOATS_AGREE
"""Prompts are multiplied in float16."""
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "gated delta nets": (ZOO["qwen35"], (2, 3)),
    "Kimi Delta Attention, latent attention": (ZOO["kimi-linear"], (0, 3)),
    "short convolutions": (ZOO["lfm2"], (0, 1, 2, 3)),
    "Mamba-1": (ZOO["jamba-moe"], (1, 2, 3)),
    "Mamba-2 and attention in parallel": (ZOO["falcon-h1"], (0, 1)),
    "RWKV-7": (ZOO["rwkv7"], (0, 1)),
}
SMALLEST: tuple[RandomModel, tuple[int, ...]] = (ZOO["jamba-moe"], (1,))
"""One block of Mamba-1, for what does not depend on the kind of the state."""


@contextmanager
def backends(decoder: Decoder, kind: CacheType = "f16") -> Iterator[list[CudaBackend]]:
    """A backend for each sequence, and the one for joint steps."""
    context = pool_positions(CONTEXT, SEQUENCES)
    first = decoder.backend(DEVICE, context=context, chunk=17, kv=kind, sequences=SEQUENCES)
    try:
        pool = first.pool
        yield [first, *(first.with_state(state) for state in pool.states[1:]), first.joined(pool)]
    finally:
        first.close()


def texts_of(decoder: Decoder) -> list[list[int]]:
    ids = decoder.ids(sum(LENGTHS))
    return [ids[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(SEQUENCES)]


def distance(row: Logits, expected: Logits) -> float:
    return float(np.linalg.norm(row - expected) / np.linalg.norm(expected))


def step_together(joined: CudaBackend, tokens: Sequence[int], starts: Sequence[int]) -> Logits:
    x = joined.embed(tokens)
    joined.forward_states(x, starts, range(len(tokens)))
    return joined.logits(x).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_each_token_of_a_joint_step_has_the_state_of_its_sequence(tmp_path: Path, model: str) -> None:
    of, layers = MODELS[model]
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder, backends(decoder) as every:
        texts = texts_of(decoder)
        expected = [decoder.reference_logits(text) for text in texts]
        for each, text, logits in zip(every, texts, expected, strict=False):
            alone = read(each, text[:-TOGETHER], (17, len(text) - TOGETHER - 18, 1))
            each.checkpoint()
            assert max(distance(row, logits[at]) for at, row in alone.items()) < AGREE
        for step in range(TOGETHER):
            starts = [length - TOGETHER + step for length in LENGTHS]
            assert all(each.is_at(start) for each, start in zip(every, starts, strict=False))
            rows = step_together(
                every[-1], [text[at] for text, at in zip(texts, starts, strict=True)], starts
            )
            for row, logits, start in zip(rows, expected, starts, strict=True):
                assert distance(row, logits[start]) < AGREE


def test_a_sequence_is_rewound_and_copied_while_others_continue(tmp_path: Path) -> None:
    of, layers = SMALLEST
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder, backends(decoder) as every:
        first, second, third, joined = every
        text, *_ = texts_of(decoder)
        expected = decoder.reference_logits(text)
        for each in (first, second):
            read(each, text[:18], (17, 1))
        kept = first.snapshot(18)
        rows = step_together(joined, [text[18], text[18]], [18, 18])
        assert max(distance(row, expected[18]) for row in rows) < AGREE
        assert second.rewind(18) == 18
        third.restore(kept, 18)
        again = read(second, text[18:20], (2,), start=18)
        copied = read(third, text[18:20], (1, 1), start=18)
        onward = read(first, text[19:20], (1,), start=19)
        for row, at in ((again[1], 19), (onward[0], 19), (copied[0], 18), (copied[1], 19)):
            assert distance(row, expected[at]) < AGREE


@pytest.mark.slow
def test_a_token_that_is_sampled_ahead_survives_steps_of_other_sequences(tmp_path: Path) -> None:
    of, layers = SMALLEST
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder, backends(decoder) as every:
        first, second, *_ = every
        one, other, _ = texts_of(decoder)

        def greedy(each: CudaBackend, text: list[int]) -> Iterator[int]:
            read(each, text[:17], (17,))
            token = text[17]
            for start in range(17, 19):
                token = each.sample_next(token, start)
                yield token

        alone = list(greedy(first, one)), list(greedy(second, other))
        assert first.rewind(0) == second.rewind(0) == 0
        pairs = list(zip(greedy(first, one), greedy(second, other), strict=True))
        assert pairs == list(zip(*alone, strict=True))


@pytest.mark.slow
def test_sequences_that_ran_ahead_can_be_read_together(tmp_path: Path) -> None:
    of, layers = MODELS["gated delta nets"]
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder, backends(decoder) as every:
        *own, joined = every
        texts = [text[:20] for text in texts_of(decoder)]
        expected = [decoder.reference_logits(text)[19] for text in texts]
        for each, text in zip(own, texts, strict=True):
            read(each, text[:18], (17, 1))
            each.sample_next(text[18], 18)
            assert each.is_at(19)
        rows = step_together(joined, [text[19] for text in texts], [19] * SEQUENCES)
        for row, wanted in zip(rows, expected, strict=True):
            assert distance(row, wanted) < AGREE
        assert own[0].is_at(20)


@pytest.mark.slow
def test_requests_of_a_recurrent_model_share_steps_on_a_gpu(tmp_path: Path) -> None:
    of, layers = MODELS["gated delta nets"]
    with opened(replace(of, formats=("F32",)), tmp_path, layers) as decoder:
        prompts = [text[:12] for text in texts_of(decoder)]

        def run(each: Sequence[Sequence[int]]) -> list[list[int]]:
            with backends(decoder) as every:
                engine = NativeEngine(decoder.specification, every[0], CONTEXT, 16)
                engine.join(every[0].pool)
                together = Run(engine)
                assert isinstance(together.scheduler.requests, JoinedRequests)
                return together.finish({0: [request(ids, 5) for ids in each]})

        assert run(prompts) == [run([ids])[0] for ids in prompts]
