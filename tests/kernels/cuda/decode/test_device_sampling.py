"""The device sampler against the host sampler, over random options and logits with ties."""

from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer_kernels.cuda.decode.sampling import (
    INVALID_LOGITS,
    SAMPLED,
    TOO_FEW_CANDIDATES,
    DeviceSamplingParams,
    SamplingBuffers,
    argmax,
    sample,
)

ROWS = 24
CLOSE = 1e-5
"""A uniform this close to a border between two tokens is excluded: the two samplers sum in another order."""


def device_settings(settings: SamplingParams) -> DeviceSamplingParams:
    names = (
        "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty"
    )  # fmt: skip
    return DeviceSamplingParams(**{name: getattr(settings, name) for name in names})


def run(device: str, logits: Any, settings: list[DeviceSamplingParams], recent: list[list[int]],
        uniforms: list[float], max_candidates: int, size: int) -> tuple[Any, Any]:  # fmt: skip
    """Results (rows, 2) and the sampled ids, -7 where nothing was written."""
    rows, vocabulary = logits.shape
    requests = [one.request(len(ids), u) for one, ids, u in zip(settings, recent, uniforms, strict=True)]
    room = max(1, *map(len, recent))
    padded = torch.tensor([ids + [0] * (room - len(ids)) for ids in recent], dtype=torch.int32, device=device)
    buffers = SamplingBuffers.allocate(rows, vocabulary, device, max_candidates, size)
    sampled = torch.full((rows,), -7, dtype=torch.int32, device=device)
    results = torch.full((rows, 2), -7, dtype=torch.int32, device=device)
    table = torch.tensor(requests, dtype=torch.float64, device=device)
    sample(torch.from_numpy(logits).to(device), table, padded, buffers, sampled, results)
    return results.cpu().numpy(), sampled.cpu().numpy()


def random_settings(random: np.random.Generator) -> SamplingParams:
    def sometimes(value: float, off: float, often: float = 0.5) -> float:
        return float(value) if random.random() < often else off

    return SamplingParams(
        temperature=sometimes(random.uniform(0.05, 3), 0.0, 0.9),
        top_k=int(sometimes(float(random.integers(1, 40)), 0, 0.6)),
        top_p=sometimes(random.uniform(0, 1), 1.0),
        min_p=sometimes(random.uniform(0, 0.5), 0.0),
        repeat_penalty=sometimes(random.uniform(0.7, 1.8), 1.0),
        frequency_penalty=sometimes(random.normal(), 0.0, 0.3),
        presence_penalty=sometimes(random.normal(), 0.0, 0.3),
        repeat_last_n=int(random.integers(1, 30)),
        seed=1,
    )


def random_logits(random: np.random.Generator, vocabulary: int) -> Any:
    logits = random.standard_normal(vocabulary) * random.choice([0.3, 2.0, 8.0])
    if random.random() < 0.5:
        logits = np.round(logits)  # ties, and both zeros
    if random.random() < 0.3:
        logits[random.random(vocabulary) < 0.3] = -np.inf
    logits[random.integers(vocabulary)] = 0.5
    return logits.astype(np.float32)


def is_borderline(probabilities: Any, prob: float, others: list[Any]) -> bool:
    """Whether rounding may decide: the uniform, or a truncation near its limit."""
    cumulative = np.cumsum(probabilities)
    if probabilities.size > 1 and np.abs(cumulative / cumulative[-1] - prob).min() < CLOSE:
        return True
    return any(ids.shape != others[0].shape or (ids != others[0]).any() for ids in others)


def neighbours(settings: SamplingParams, logits: Any, history: list[int]) -> list[Any]:
    """The ids that remain with top_p and min_p as they are, and slightly lower and higher."""
    result = []
    for factor in (1.0, 1 - CLOSE, 1 + CLOSE):
        values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        values["min_p"] = min(values["min_p"] * factor, 1.0)
        values["top_p"] = (
            values["top_p"] if values["top_p"] == 1 else min(values["top_p"] * factor, 0.9999999)
        )
        result.append(Sampler(SamplingParams(**values), logits.size).distribution(logits, history)[0])
    return result


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("vocabulary", "max_candidates", "size"), [(200, 16, 128), (61, 64, 128), (333, 32, 128)]
)
def test_the_device_samples_the_same_token_as_the_host(
    device: str, vocabulary: int, max_candidates: int, size: int
) -> None:
    random = np.random.default_rng(vocabulary)
    compared = refused = 0
    for _ in range(12):
        settings = [random_settings(random) for _ in range(ROWS)]
        logits = np.stack([random_logits(random, vocabulary) for _ in range(ROWS)])
        histories = [
            [int(i) for i in random.integers(0, vocabulary, random.integers(0, 50))] for _ in range(ROWS)
        ]
        recent = [ids[-one.repeat_last_n :] for one, ids in zip(settings, histories, strict=True)]
        samplers = [Sampler(one, vocabulary) for one in settings]
        uniforms = [float(prob) for prob in random.random(ROWS)]
        uniforms[0] = 0.0
        results, sampled = run(
            device, logits, [device_settings(one) for one in settings], recent, uniforms, max_candidates, size
        )
        for row in range(ROWS):
            ids, probabilities = samplers[row].distribution(logits[row], histories[row])
            token, status = results[row]
            if status == TOO_FEW_CANDIDATES:
                refused += 1
                assert token == -1
                assert sampled[row] == -7
                assert needs_more_than(max_candidates, settings[row], logits[row], histories[row])
                continue
            assert status == SAMPLED
            assert sampled[row] == token
            if is_borderline(
                probabilities,
                uniforms[row],
                neighbours(settings[row], logits[row], histories[row]),
            ):
                continue
            cumulative = np.cumsum(probabilities)
            position = int(np.searchsorted(cumulative, uniforms[row] * cumulative[-1], side="right"))
            assert token == ids[min(position, ids.size - 1)], (settings[row], uniforms[row])
            compared += 1
    assert compared > 120
    assert (refused > 20) == (vocabulary > max_candidates)


def needs_more_than(max_candidates: int, settings: SamplingParams, logits: Any, history: list[int]) -> bool:
    """Whether the host needed more than the `kept` best: candidates, or the mass of a longer top-k."""
    if settings.top_k > max_candidates and settings.top_p < 1:
        return True
    names = ("repeat_penalty", "frequency_penalty", "presence_penalty", "repeat_last_n", "top_k", "top_p")
    values = {name: getattr(settings, name) for name in names}
    looser = SamplingParams(temperature=1.0, min_p=settings.min_p * (1 - CLOSE), **values)
    adjusted = Sampler(looser, logits.size).adjusted(logits, history)
    remaining = Sampler(looser, logits.size).distribution(logits, history)[0].size
    disallowed = np.isneginf(adjusted).sum()
    return bool(remaining >= max_candidates or remaining + disallowed > max_candidates)


def test_temperature_zero_samples_the_lowest_id_among_equals(device: str) -> None:
    logits = np.zeros((2, 200), np.float32)
    logits[0, [77, 150]] = 3
    logits[1] = -1
    logits[1, 100], logits[1, 60] = -0.0, 0.0
    results, _ = run(device, logits, [DeviceSamplingParams(0.0)] * 2, [[], []], [0.9, 0.9], 16, 64)
    assert results.tolist() == [[77, SAMPLED], [60, SAMPLED]]
    results, _ = run(
        device, logits, [DeviceSamplingParams(0.0, presence_penalty=9)] * 2, [[77], [60, 100]], [0, 0], 16, 64
    )
    assert results[:, 0].tolist() == [150, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_sample_nothing(device: str, value: float, temperature: float) -> None:
    logits = np.zeros((3, 200), np.float32)
    logits[0, 130] = value
    logits[1] = -np.inf
    settings = [DeviceSamplingParams(temperature, top_k=4)] * 3
    results, sampled = run(device, logits, settings, [[], [], []], [0.5] * 3, 16, 64)
    assert results.tolist()[:2] == [[-1, INVALID_LOGITS]] * 2
    assert sampled.tolist()[:2] == [-7, -7]
    assert results[2, 1] == SAMPLED


def test_a_large_vocabulary_without_truncation_is_sampled_on_the_host(device: str) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    requested = [
        DeviceSamplingParams(1.0),
        DeviceSamplingParams(1.0, top_k=17),
        DeviceSamplingParams(1.0, top_k=16),
        DeviceSamplingParams(1.0, min_p=1e-9),
        DeviceSamplingParams(1.0, top_p=0.999),
    ]
    results, _ = run(device, logits, requested, [[]] * 5, [0.3] * 5, 16, 64)
    assert results[:, 1].tolist() == [
        TOO_FEW_CANDIDATES,
        TOO_FEW_CANDIDATES,
        SAMPLED,
        TOO_FEW_CANDIDATES,
        TOO_FEW_CANDIDATES,
    ]


@pytest.mark.parametrize("vocabulary", [5, 64, 111, 1000])
def test_argmax_equals_numpy(device: str, vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    logits = np.round(random.standard_normal((6, vocabulary)) * 2).astype(np.float32)
    logits[5, vocabulary // 2] = np.nan
    logits[4] = -np.inf
    buffers = SamplingBuffers.allocate(6, vocabulary, device, 2, 64)
    sampled = torch.full((6,), -7, dtype=torch.int32, device=device)
    results = torch.full((6, 2), -7, dtype=torch.int32, device=device)
    argmax(torch.from_numpy(logits).to(device), buffers, sampled, results)
    assert results[:4, 0].tolist() == logits[:4].argmax(axis=1).tolist() == sampled[:4].tolist()
    assert results[:4, 1].tolist() == [SAMPLED] * 4
    assert results[4:].tolist() == [[-1, INVALID_LOGITS]] * 2


def test_device_samples_have_the_distribution_of_host_samples(device: str) -> None:
    logits = np.tile(np.random.default_rng(3).standard_normal(40).astype(np.float32), (200, 1))
    settings = SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.02)
    ids, probabilities = Sampler(settings, 40).distribution(logits[0], [])
    uniforms = [(i + 0.5) / 200 for i in range(200)]
    results, _ = run(device, logits, [device_settings(settings)] * 200, [[]] * 200, uniforms, 16, 64)
    counts = np.bincount(results[:, 0], minlength=40)
    assert set(np.flatnonzero(counts)) <= set(ids.tolist())
    np.testing.assert_allclose(counts[ids] / 200, probabilities, atol=1.01 / 200)


def test_an_invalid_candidate_capacity_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="top_count: saw 48, wanted a power of two from 2 to 256"):
        SamplingBuffers.allocate(1, 100, device, 48)
    with pytest.raises(ValueError, match="top_count: saw 512, wanted a power of two from 2 to 256"):
        SamplingBuffers.allocate(1, 100, device, 512)
