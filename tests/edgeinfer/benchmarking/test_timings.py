"""Rates, deviations and ratios from seconds."""

import pytest

from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN, Timings, speed_ratio


def test_rates_are_tokens_over_seconds() -> None:
    timings = Timings((0.5, 0.25), tokens=128)
    assert timings.rates == [256, 512]
    assert timings.mean_rate == 384
    assert timings.deviation == pytest.approx(181.02, abs=0.01)
    assert timings.mean_seconds == 0.375


def test_a_single_segment_has_no_deviation() -> None:
    assert Timings((2.0,)).deviation == 0


def test_the_best_decile_is_the_tenth_percentile() -> None:
    timings = Timings(tuple(range(100, 0, -1)))
    assert timings.seconds_at(BEST_DECILE) == pytest.approx(10.9)
    assert timings.seconds_at(MEDIAN) == 50.5
    assert timings.rate_at(MEDIAN) == 1 / 50.5


def test_one_slow_segment_changes_neither_best_decile_nor_median() -> None:
    quiet = Timings((1.0,) * 10)
    disturbed = Timings((1.0,) * 9 + (60.0,))
    for share in (BEST_DECILE, MEDIAN):
        assert speed_ratio(quiet, disturbed, share) == 1
    assert disturbed.mean_rate < quiet.mean_rate


def test_the_ratio_is_above_one_if_edgeinfer_is_faster() -> None:
    assert speed_ratio(Timings((1.0,), 4), Timings((3.0,), 4), MEDIAN) == 3


@pytest.mark.parametrize(("seconds", "tokens"), [((), 1), ((0.0,), 1), ((1.0,), 0)])
def test_a_zero_time_is_not_a_measurement(seconds: tuple[float, ...], tokens: int) -> None:
    with pytest.raises(ValueError, match="wanted positive seconds"):
        Timings(seconds, tokens)


def test_an_interquartile_range_above_a_tenth_is_too_noisy() -> None:
    steady = Timings((1.0, 1.01, 1.02, 1.03, 5.0))
    assert steady.spread == pytest.approx(0.02 / 1.02)
    assert not steady.is_noisy
    noisy = Timings((1.0, 1.0, 1.2, 1.4, 1.5))
    assert noisy.spread == pytest.approx(0.4 / 1.2)
    assert noisy.is_noisy
    assert not Timings((1.0, 2.0, 3.0)).is_noisy  # too few samples
