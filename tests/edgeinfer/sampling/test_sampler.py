"""The whole chain: its order, its distribution, its samples, its state."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.errors import LogitsError
from edgeinfer.sampling import Sampler, SamplingParams, chain
from edgeinfer.speculation.loop_drafter import draft_sampling

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(*probabilities: float) -> npt.NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


def distribution(
    logits: npt.NDArray[np.float32], history: list[int] | None = None, **fields: Any
) -> dict[int, float]:
    sampler = Sampler(SamplingParams(**{**OFF, **fields}), logits.size)
    ids, probabilities = sampler.distribution(logits, history or [])
    assert ids.tolist() == sorted(ids.tolist())
    assert (probabilities > 0).all()
    assert math.isclose(probabilities.sum(), 1.0, rel_tol=1e-12)
    return {int(token_id): round(float(p), 5) for token_id, p in zip(ids, probabilities, strict=True)}


def test_an_undeclared_sampler_disables_the_device_and_the_draft_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = chain.SamplerStep("new", "truncate", lambda logits, params: chain.top_k(logits, 1), lambda p: True)
    assert draft_sampling(SamplingParams()) is not None
    monkeypatch.setattr(chain, "CHAIN", (*chain.CHAIN, new))
    assert not all(step.on_device for step in chain.active_steps(SamplingParams()))
    assert draft_sampling(SamplingParams()) is None
    assert distribution(logits_of(0.4, 0.6)) == {1: 1.0}


def test_truncation_has_no_effect_at_temperature_0() -> None:
    steps = chain.active_steps(SamplingParams(temperature=0, xtc_probability=1.0, presence_penalty=1.0))
    assert [step.name for step in steps] == ["penalties"]


def test_mirostat_replaces_all_steps_after_the_penalties() -> None:
    steps = chain.active_steps(SamplingParams(mirostat=2, xtc_probability=1.0, logit_bias={1: 1.0}))
    assert [step.name for step in steps] == ["logit_bias", "mirostat"]


def test_with_all_samplers_off_the_distribution_is_softmax() -> None:
    assert distribution(logits_of(0.1, 0.2, 0.3, 0.4)) == {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}


def test_top_n_sigma_counts_standard_deviations_of_the_finite_logits() -> None:
    logits = np.array([3.0, 2.0, 1.0, 0.0, -np.inf], np.float32)  # a deviation of 1.118
    assert sorted(distribution(logits, top_n_sigma=0.5)) == [0]
    assert sorted(distribution(logits, top_n_sigma=1.0)) == [0, 1]
    assert sorted(distribution(logits, top_n_sigma=2.0)) == [0, 1, 2]
    for off in (0.0, -1.0):
        assert sorted(distribution(logits, top_n_sigma=off)) == [0, 1, 2, 3]


def test_top_n_sigma_comes_before_top_k() -> None:
    logits = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    assert sorted(distribution(logits, top_n_sigma=1.0, top_k=3)) == [0, 1]  # of three, 0.8 deviations


def test_temperature_raises_probabilities_to_its_inverse() -> None:
    assert distribution(logits_of(0.2, 0.8), temperature=0.5) == {0: 0.05882, 1: 0.94118}
    assert distribution(logits_of(0.2, 0.8), temperature=2.0) == {0: 0.33333, 1: 0.66667}


def test_temperature_comes_after_the_truncations() -> None:
    # Without the temperature of 5, the probability 0.6 alone reaches the share.
    assert distribution(logits_of(0.1, 0.6, 0.3), top_p=0.55, temperature=5.0) == {1: 1.0}


def test_top_p_counts_the_share_of_what_top_k_left() -> None:
    # Of 0.4 and 0.3 the first holds 0.57.
    assert distribution(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == {0: 1.0}
    assert distribution(logits_of(0.4, 0.3, 0.2, 0.1), top_p=0.5) == {0: 0.57143, 1: 0.42857}


def test_penalties_come_before_the_truncations() -> None:
    logits = np.array([2.0, 1.5, 1.0], dtype=np.float32)
    assert list(distribution(logits, [0], presence_penalty=0.7, top_k=1)) == [1]


def test_bias_comes_before_the_penalties() -> None:
    logits = np.array([0.0, 0.0], dtype=np.float32)
    given = distribution(logits, [0], logit_bias={0: 2.0}, repeat_penalty=2.0)
    assert given == {0: round(math.e / (1 + math.e), 5), 1: round(1 / (1 + math.e), 5)}


def test_a_bias_of_minus_infinity_bans_a_token() -> None:
    assert distribution(logits_of(0.8, 0.2), logit_bias={0: -math.inf}) == {1: 1.0}


def test_xtc_applies_with_its_probability() -> None:
    # With probability 0.5 the token of 0.5 is dropped, and 0.3 and 0.2 are normalized.
    given = distribution(logits_of(0.5, 0.3, 0.2), xtc_probability=0.5, xtc_threshold=0.25)
    assert given == {0: 0.25, 1: round(0.15 + 0.5 * 0.6, 5), 2: round(0.1 + 0.5 * 0.4, 5)}
    assert list(distribution(logits_of(0.5, 0.3, 0.2), xtc_probability=1.0, xtc_threshold=0.25)) == [1, 2]


def test_dry_reaches_the_distribution() -> None:
    logits = np.zeros(4, dtype=np.float32)
    given = distribution(logits, [0, 1, 2, 0, 1], dry_multiplier=1.0)
    assert given[2] == round(math.exp(-1) / (3 + math.exp(-1)), 5)


def test_temperature_zero_is_argmax_after_bias_penalties_and_dry() -> None:
    logits = np.array([3.0, 2.9, 2.8, 2.7], dtype=np.float32)
    assert distribution(logits, temperature=0.0) == {0: 1.0}
    assert distribution(logits, [0], temperature=0.0, repeat_penalty=1.5) == {1: 1.0}
    assert distribution(logits, temperature=0.0, logit_bias={3: 1.0}) == {3: 1.0}
    repeated = [0, 1, 2, 0, 1, 2]
    assert distribution(logits, repeated, temperature=0.0, dry_multiplier=5.0) == {1: 1.0}


def test_temperature_zero_samples_the_lowest_id_among_equals() -> None:
    assert distribution(np.array([1, 5, 5, 5], dtype=np.float32), temperature=0.0, mirostat=2) == {1: 1.0}


def test_the_lowest_temperature_neither_overflows_nor_drops_equals() -> None:
    assert distribution(np.array([1, 5, 5, -900], dtype=np.float32), temperature=1e-300) == {1: 0.5, 2: 0.5}


def test_one_finite_logit_is_certain() -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[4321] = -7.0
    variants: list[dict[str, Any]] = [
        {},
        {"mirostat": 2},
        {"typical_p": 0.5},
        {"xtc_probability": 1.0},
        {"temperature": 0.0},
    ]
    for fields in variants:
        sampler = Sampler(SamplingParams(**fields), logits.size)
        assert sampler.sample(logits, []) == 4321


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, math.nan, 1.0], "logits: saw NaN for 1 of 3 tokens (first: token 1), wanted numbers; "),
        ([0.0, math.inf, 1.0], "logits: saw +inf for token 1, wanted finite numbers"),
        ([-math.inf] * 3, "logits: saw -inf for all 3 tokens, wanted at least one allowed token"),
        ([0.0, 1.0], "logits: saw shape (2,), wanted (3,)"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_cannot_be_sampled_are_an_error(
    logits: list[float], message: str, temperature: float
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 3)
    with pytest.raises(LogitsError) as caught:
        sampler.sample(np.array(logits, dtype=np.float32), [])
    assert str(caught.value).startswith(message)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"xtc_probability": 0.5, "temperature": 1.3},
        {"mirostat": 2, "mirostat_tau": 3.0},
        {"typical_p": 0.7, "repeat_penalty": 1.3},
    ],
)
def test_samples_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(5).standard_normal(300).astype(np.float32) * 2
    sampler = Sampler(SamplingParams(seed=11, **fields), logits.size)
    ids, probabilities = sampler.distribution(logits, [1, 2, 3])
    samples = 3000
    seeded_logits = np.bincount(
        [sampler.sample(logits, [1, 2, 3]) for _ in range(samples)], minlength=logits.size
    )
    assert seeded_logits.sum() == seeded_logits[ids].sum()
    # Cells with an expectation below five are pooled, as the chi-square approximation requires.
    expected, seen = probabilities * samples, seeded_logits[ids].astype(float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = expected.size - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is close to normal; 4 standard deviations.
    spread = math.sqrt(2 / (9 * freedom))
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread**2)) / spread < 4


def test_a_seed_determines_the_sequence() -> None:
    logits = np.zeros(1000, dtype=np.float32)

    def seeded_logits(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(**OFF, seed=seed), logits.size)
        return [sampler.sample(logits, []) for _ in range(20)]

    assert seeded_logits(7) == seeded_logits(7)
    assert seeded_logits(7) != seeded_logits(8)


def test_the_reported_random_seed_repeats_the_samples() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    first = Sampler(SamplingParams(**OFF), logits.size)
    again = Sampler(SamplingParams(**OFF, seed=first.seed), logits.size)
    assert [first.sample(logits, []) for _ in range(9)] == [again.sample(logits, []) for _ in range(9)]


def test_restoring_a_snapshot_repeats_samples_and_mirostat() -> None:
    logits = np.random.default_rng(6).standard_normal(500).astype(np.float32)
    sampler = Sampler(SamplingParams(seed=1, mirostat=2), logits.size)

    def step() -> int:
        token_id = sampler.sample(logits, [])
        sampler.accept(token_id)
        return token_id

    step()
    state = sampler.snapshot()
    first = [step() for _ in range(10)]
    sampler.restore(state)
    assert [step() for _ in range(10)] == first


def test_sampling_does_not_change_the_logits() -> None:
    logits = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    settings = SamplingParams(repeat_penalty=2.0, logit_bias={1: 4.0}, dry_multiplier=1.0)
    Sampler(settings, 3).sample(logits, [0, 1, 0, 1])
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_mirostat_drops_tokens_above_its_surprise_limit() -> None:
    # The limit starts at twice tau: 2 bits, a probability of a quarter.
    assert distribution(logits_of(0.5, 0.3, 0.2), mirostat=2, mirostat_tau=1.0) == {0: 0.625, 1: 0.375}
    assert distribution(logits_of(0.1, 0.3, 0.2, 0.4), mirostat=2, mirostat_tau=0.1) == {3: 1.0}


def test_mirostat_updates_from_the_surprise_of_the_sampled_token() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    sampler = Sampler(SamplingParams(**OFF, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5), 3)
    sampler.distribution(logits, [])
    sampler.accept(1)
    # 0.375 has a surprise of 1.41504 bits, 0.41504 more than the target.
    assert math.isclose(sampler.snapshot().surprise_limit, 2 - 0.5 * 0.41504, rel_tol=1e-4)


def test_mirostat_ignores_a_token_that_was_forced() -> None:
    sampler = Sampler(SamplingParams(**OFF, mirostat=2, mirostat_tau=1.0), 3)
    sampler.distribution(logits_of(0.5, 0.3, 0.2), [])
    sampler.accept(2)
    assert sampler.snapshot().surprise_limit == 2.0


def test_mirostat_replaces_the_truncations() -> None:
    given = distribution(logits_of(0.5, 0.3, 0.2), mirostat=2, top_k=1, top_p=0.1, min_p=0.9)
    assert len(given) == 3


def test_top_k_of_several_rows_equals_top_k_of_each() -> None:
    rows = np.random.default_rng(4).standard_normal((5, 300)).astype(np.float32)
    rows[2, [7, 90]] = 9.0  # the lowest id among equals
    sampler = Sampler(SamplingParams(temperature=0.0), 300)
    assert sampler.best_of_each(rows) == [sampler.sample(row, []) for row in rows]
    others: list[dict[str, Any]] = [{"temperature": 0.5}, {"temperature": 0.0, "repeat_penalty": 1.2}]
    for fields in others:
        assert Sampler(SamplingParams(**fields), 300).best_of_each(rows) is None
    rows[3, 5] = np.nan
    with pytest.raises(LogitsError, match="saw NaN for 1 of 300 tokens"):
        sampler.best_of_each(rows)
