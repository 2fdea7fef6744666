"""Log-probabilities, divergences and their summary, against direct formulas in exact or long arithmetic."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.errors import EdgeInferError
from edgeinfer.evaluation import scores
from edgeinfer.evaluation.scores import Scores, log_softmax, row_blocks, score
from edgeinfer.evaluation.summary import Estimate, exponential, mean, summarize

RANDOM = np.random.default_rng(11)


def logits(rows: int = 7, columns: int = 50, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return (spread * RANDOM.standard_normal((rows, columns))).astype(np.float32)


def exact(row: npt.NDArray[np.float32]) -> list[float]:
    """log-softmax of one row with a correctly rounded sum."""
    total = math.log(math.fsum(math.exp(float(value)) for value in row))
    return [float(value) - total for value in row]


def test_log_softmax_is_exact_to_float64() -> None:
    values = logits()
    np.testing.assert_allclose(log_softmax(values), [exact(row) for row in values], rtol=0, atol=1e-14)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 88.0, 1e4, 3e38])
def test_log_softmax_neither_overflows_nor_vanishes(offset: float) -> None:
    result = log_softmax(np.array([[offset, offset]], np.float32))
    np.testing.assert_allclose(result, [[-math.log(2)] * 2], rtol=0, atol=1e-15)


def test_tiny_log_probabilities_stay_finite() -> None:
    result = log_softmax(np.array([[0.0, -5000.0]], np.float32))
    assert result.tolist() == [[0.0, -5000.0]]


def test_row_blocks_cover_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", 100)
    assert list(row_blocks(5, 40)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(row_blocks(2, 1000)) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("block", [1, 100, 10_000])
def test_scores_equal_the_formulas(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", block)
    ours, base = logits(), logits()
    base[2] = ours[2]
    targets = [0, 1, 2, 3, 49, 5, 6]
    result = score(ours, targets, base)
    for row, target in enumerate(targets):
        q, p = exact(ours[row]), exact(base[row])
        divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert result.loss[row] == pytest.approx(-q[target], abs=1e-13)
        assert result.base_loss[row] == pytest.approx(-p[target], abs=1e-13)
        assert result.divergence[row] == pytest.approx(divergence, abs=1e-13)
        assert result.same_top[row] == (np.argmax(ours[row]) == np.argmax(base[row]))
    assert result.divergence[2] == 0


def test_tiny_divergences_are_not_lost_in_rounding() -> None:
    base = logits(1, 1000)
    ours = base.copy()
    ours[0, 0] += np.float32(2.0**-12)
    change = float(ours[0, 0]) - float(base[0, 0])
    p = math.exp(exact(base[0])[0])
    # To second order in the change: p (1 - p) change² / 2.
    expected = p * (1 - p) * change**2 / 2
    assert score(ours, [0], base).divergence[0] == pytest.approx(expected, rel=1e-3)


def test_without_a_base_nothing_is_compared() -> None:
    result = score(logits(), [1] * 7)
    assert (len(result), len(result.base_loss), len(result.divergence)) == (7, 0, 0)
    assert summarize(result, 1, 16).divergence is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    values = logits()
    broken = values.copy()
    broken[3, 3] = bad
    for pair in ((broken, values), (values, broken)):
        with pytest.raises(EdgeInferError, match="aren't finite"):
            score(pair[0], [0] * 7, pair[1])


def test_perplexity_is_the_exponential_of_the_mean_loss_with_its_error() -> None:
    loss = np.array([1.0, 2.0, 3.0, 6.0])
    empty = np.empty(0)
    result = summarize(Scores(loss, empty, empty, np.empty(0, np.bool_)), 2, 8)
    # llama.cpp: exp(m) · √((Σ loss²/n - m²) / (n - 1)).
    spread = Fraction(1 + 4 + 9 + 36, 4) - Fraction(12, 4) ** 2
    assert result.perplexity.value == pytest.approx(math.exp(3))
    assert result.perplexity.error == pytest.approx(math.exp(3) * math.sqrt(spread / 3))
    assert (result.tokens, result.windows, result.context) == (4, 2, 8)


def test_a_divergence_is_summarized() -> None:
    loss, base_loss = np.array([0.5, 1.0, 2.0]), np.array([0.5, 1.5, 1.0])
    same = np.array([True, False, True])
    result = summarize(Scores(loss, base_loss, np.array([0.0, 0.1, 0.4]), same), 1, 8).divergence
    assert result is not None
    assert result.mean.value == pytest.approx(0.5 / 3)
    assert result.median == pytest.approx(0.1)
    assert result.maximum == 0.4
    assert result.percentile_99 == pytest.approx(0.394)
    assert result.same_top.value == pytest.approx(2 / 3)
    assert result.perplexity_ratio.value == pytest.approx(math.exp(0.5 / 3))
    change = np.exp(-loss) - np.exp(-base_loss)
    assert result.mean_probability_change.value == pytest.approx(change.mean())
    assert result.rms_probability_change.value == pytest.approx(math.sqrt((change**2).mean()))


def test_a_single_value_has_no_error() -> None:
    assert mean(np.array([2.0])) == Estimate(2.0, 0.0)
    assert exponential(Estimate(0.0, 0.5)) == Estimate(1.0, 0.5)


def test_no_scored_tokens_give_no_result() -> None:
    empty = np.empty(0)
    with pytest.raises(ValueError, match="no tokens scored"):
        summarize(Scores(empty, empty, empty, np.empty(0, np.bool_)), 0, 8)
