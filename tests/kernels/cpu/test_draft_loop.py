"""Drafts by the draft loop against the same drafts made one by one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer_kernels.cpu.runtime.abi import LOGITS_PER_PART, MAX_CANDIDATES, TILE_TOKENS
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest, DraftSampling
from tests.kernels.conftest import ISAS
from tests.kernels.cpu.test_cpu_backend import cpu, engine_for
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

DRAFT = Path(edgeinfer.__file__).parent / "builtin" / "edgeinfer-tiny-draft-5m-Q8_0.gguf"
IDS = np.random.default_rng(3).integers(3, VOCABULARY, 60).tolist()
PROMPT_ENDS = range(3, TILE_TOKENS, 3)
"""Lengths of prompts that do not use AMX: it rounds differently from the kernels of single tokens."""
GREEDY = DraftSampling()
DEFAULT = DraftSampling(0.8, 40, 0.95, 0.05)


def softmax_of(logits: npt.NDArray[np.float32], token: int) -> float:
    wide = logits.astype(np.float64)
    return float(1 / np.exp(wide - wide[token]).sum())


def one_by_one(engine: NativeEngine, ids: list[int], count: int, vocabulary: int) -> list[tuple[int, float]]:
    """The most probable tokens after `ids`, each with its softmax, evaluated one by one."""
    result, logits = list[tuple[int, float]](), engine.append(ids)[:vocabulary]
    for _ in range(count):
        token = int(logits.argmax())
        result.append((token, softmax_of(logits, token)))
        logits = engine.append([token])[:vocabulary]
    return result


def check_greedy(engine: NativeEngine, begin: list[int], given: int, count: int, vocabulary: int) -> None:
    engine.rewind(0)
    engine.append(begin[:-given])
    expected = one_by_one(engine, begin[-given:], count, vocabulary)
    next_logits = engine.append([5])
    engine.rewind(len(begin) - given)
    actual = engine.draft(begin[-given:], DraftRequest([0.0] * count, (), vocabulary, GREEDY))
    assert actual.ids == [token for token, _ in expected]
    assert actual.probs == pytest.approx([prob for _, prob in expected], rel=1e-5)
    assert actual.candidates == ()
    assert actual.read == given + count - 1
    assert engine.ids == [*begin, *actual.ids[:-1]]
    # The loop leaves the cache that single tokens leave.
    engine.append(actual.ids[-1:])
    np.testing.assert_array_equal(engine.append([5]), next_logits)


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2moe", "deepseek2", "bloom", "gpt2"])
def test_the_draft_loop_equals_single_draft_steps(tmp_path: Path, isa: str, name: str) -> None:
    path = replace(ZOO[name], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    engine = engine_for(path, cpu(isa))
    for given, count in ((1, 1), (1, 7), (2, 4), (16, 3)):
        check_greedy(engine, IDS[:40], given, count, VOCABULARY)
        check_greedy(engine, IDS[:17], given, count, 63)
    engine.close()


@pytest.fixture(scope="module", params=[1, 2, 3])
def draft(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    """The built-in draft: a vocabulary of several parts."""
    engine = engine_for(DRAFT, cpu(threads=request.param), "f16")
    assert engine.vocabulary_size > 2 * LOGITS_PER_PART
    yield engine
    engine.close()


def test_the_best_of_many_tokens_is_found_by_any_number_of_threads(draft: NativeEngine) -> None:
    for vocabulary in (draft.vocabulary_size, 3 * LOGITS_PER_PART, LOGITS_PER_PART + 1, 17, 1):
        check_greedy(draft, IDS[:30], 2, 5, vocabulary)


def test_any_number_of_threads_gives_the_same_probs() -> None:
    result = []
    for threads in (1, 2, 5):
        engine = engine_for(DRAFT, cpu(threads=threads), "f16")
        result.append(engine.draft(IDS[:9], DraftRequest([0.0] * 6, (), engine.vocabulary_size, GREEDY)))
        engine.close()
    assert result[0] == result[1] == result[2]


def drafted_tokens(
    engine: NativeEngine, min_probs: list[float], max_probs: list[float] | tuple[()] = ()
) -> DraftedTokens:
    engine.rewind(0)
    return engine.draft(IDS[:9], DraftRequest(min_probs, max_probs, engine.vocabulary_size, GREEDY))


def test_a_draft_ends_before_the_first_token_unlikely_to_be_reached(draft: NativeEngine) -> None:
    whole = drafted_tokens(draft, [0.0] * 6)
    reached = np.cumprod(whole.probs).tolist()
    for length in range(6):
        min_probs = [
            *(0.999 * prob for prob in reached[:length]),
            *(1.001 * prob for prob in reached[length:]),
        ]
        actual = drafted_tokens(draft, min_probs)
        assert actual.ids == whole.ids[:length]
        assert actual.read == 9 + length  # the rejected draft token comes after all others
        assert draft.ids == [*IDS[:9], *actual.ids]


def test_a_draft_ends_after_the_last_profitable_token(draft: NativeEngine) -> None:
    whole = drafted_tokens(draft, [0.0] * 6)
    reached = np.cumprod(whole.probs).tolist()
    for length in range(1, 6):
        max_probs = [*[0.0] * (length - 1), 1.001 * reached[length - 1], *[0.0] * (6 - length)]
        actual = drafted_tokens(draft, [0.0] * 6, max_probs)
        assert actual.ids == whole.ids[:length]
        assert actual.read == 9 + length - 1
        assert draft.ids == [*IDS[:9], *actual.ids[:-1]]


SAMPLING = {
    "top-k alone": DraftSampling(1.3, 7, 1.0, 0.0),
    "min-p": DraftSampling(1.0, 0, 1.0, 0.2),
    "one is left": DraftSampling(1.0, 1, 1.0, 0.0),
}


@pytest.mark.default_cases
@pytest.mark.parametrize("name", SAMPLING)
def test_candidates_are_those_of_the_sampler(draft: NativeEngine, name: str) -> None:
    params = SAMPLING[name]
    settings = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    sampler = Sampler(settings, draft.vocabulary_size)
    for end in PROMPT_ENDS:
        draft.rewind(0)
        expected_ids, expected = sampler.distribution(draft.append(IDS[:end]), IDS[:end])
        for number in (0.0, 0.3, 0.9999999):
            draft.rewind(end - 1)
            actual = draft.draft(
                IDS[end - 1 : end], DraftRequest([0.0], (), draft.vocabulary_size, params, [number])
            )
            (ids, weights), prob = actual.candidates[0], actual.probs[0]
            assert ids.tolist() == expected_ids.tolist()
            np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-5)
            index = min(int(np.searchsorted(np.cumsum(expected), number, side="right")), len(expected) - 1)
            assert actual.ids == [int(expected_ids[index])]
            if len(expected) > 1:
                assert prob == pytest.approx(expected[index], rel=2e-5)


@pytest.mark.parametrize("params", [DEFAULT, DraftSampling(0.7, 50, 0.6, 0.0)])
def test_draft_top_p_may_drop_sampler_candidates(draft: NativeEngine, params: DraftSampling) -> None:
    settings = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    sampler = Sampler(settings, draft.vocabulary_size)
    for end in PROMPT_ENDS:
        draft.rewind(0)
        expected, probs = sampler.distribution(draft.append(IDS[:end]), IDS[:end])
        draft.rewind(end - 1)
        actual = draft.draft(
            IDS[end - 1 : end], DraftRequest([0.0], (), draft.vocabulary_size, params, [0.5])
        )
        ids, weights = actual.candidates[0]
        indices = np.searchsorted(expected, ids)
        assert expected[indices].tolist() == ids.tolist()
        assert probs[indices].sum() > 0.6
        np.testing.assert_allclose(weights / weights.max(), probs[indices] / probs.max(), rtol=2e-5)


def test_too_many_candidates_are_truncated_to_the_most_probable(draft: NativeEngine) -> None:
    draft.rewind(0)
    logits = draft.append(IDS[:9])
    draft.rewind(0)
    params = DraftSampling(2.0, 0, 1.0, 0.0)
    actual = draft.draft(IDS[:9], DraftRequest([0.0], (), draft.vocabulary_size, params, [0.5]))
    ids, weights = actual.candidates[0]
    assert MAX_CANDIDATES // 2 < len(ids) <= MAX_CANDIDATES
    assert set(ids.tolist()) == set(np.argsort(-logits, kind="stable")[: len(ids)].tolist())
    np.testing.assert_allclose(weights, np.exp((logits[ids] - logits.max()) / 2), rtol=1e-5)


def test_a_seeded_draft_is_the_best_token_with_its_candidate_probability(draft: NativeEngine) -> None:
    draft.rewind(0)
    settings = SamplingParams(temperature=0.7, top_k=0, top_p=1.0, min_p=0.1)
    sampler, params = Sampler(settings, draft.vocabulary_size), DraftSampling(0.7, 0, 1.0, 0.1)
    ids, probs = sampler.distribution(draft.append(IDS[:12]), IDS[:12])
    draft.rewind(0)
    actual = draft.draft(IDS[:12], DraftRequest([0.0] * 3, (), draft.vocabulary_size, params))
    assert actual.ids[0] == int(ids[probs.argmax()])
    assert actual.probs[0] == pytest.approx(float(probs.max()), rel=2e-5)
    assert actual.candidates == ()


def test_non_finite_logits_end_the_draft(tmp_path: Path) -> None:
    path = replace(ZOO["llama"], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    engine = engine_for(path, lambda s, w, c: cpu()(replace(s, logit_scale=1e38), w, c))
    actual = engine.draft(IDS[:5], DraftRequest([0.0] * 3, (), VOCABULARY, GREEDY))
    assert (actual.ids, actual.read, engine.ids) == ([], 5, IDS[:5])
    engine.close()


def test_a_model_with_logit_transforms_drafts_one_token_at_a_time(tmp_path: Path) -> None:
    engine = engine_for(replace(ZOO["gemma2"], formats=("Q8_0",)).write(tmp_path / "capped.gguf"), cpu())
    assert engine.specification.logit_soft_cap
    assert engine.capabilities.max_draft_prompt == 0
    engine.close()
    engine = engine_for(ZOO["llama"].write(tmp_path / "floats.gguf"), cpu())  # numpy reads its embeddings
    assert engine.capabilities.max_draft_prompt == 0
    engine.close()


def test_a_draft_loop_limits_its_tokens_and_drafts(draft: NativeEngine) -> None:
    draft.rewind(0)
    for ids, count in ((IDS[:17], 1), (IDS[:1], 17), (IDS[:1], 0)):
        with pytest.raises(ValueError, match="wanted 1 to 16 of each"):
            draft.draft(ids, DraftRequest([0.0] * count, (), draft.vocabulary_size, GREEDY))
    assert draft.ids == []
