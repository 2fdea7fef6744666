"""Summary of scored tokens: perplexity and divergences, with their uncertainties."""

import math
from dataclasses import dataclass

import numpy as np

from edgeinfer.evaluation.scores import Column, Scores


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Divergence:
    """Divergence of a model from its base, in nats; probabilities as fractions."""

    base_perplexity: Estimate
    perplexity_ratio: Estimate
    """Perplexity over that of the base; the error is that of a paired comparison."""
    mean: Estimate
    median: float
    percentile_90: float
    percentile_99: float
    maximum: float
    same_top: Estimate
    mean_probability_change: Estimate
    """Mean change of the probability of the text's tokens, p - p_base."""
    rms_probability_change: Estimate


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    tokens: int
    """Number of scored tokens."""
    windows: int
    context: int
    perplexity: Estimate
    divergence: Divergence | None = None


def mean(values: Column) -> Estimate:
    """The mean and its standard error (none for a single value)."""
    count = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Estimate(float(np.mean(values)), error)


def exponential(estimate: Estimate) -> Estimate:
    """exp of an estimate; the error to first order."""
    value = math.exp(estimate.value)
    return Estimate(value, value * estimate.error)


def summarize(scores: Scores, windows: int, context: int) -> Evaluation:
    """The summary. Raises `ValueError` if there are no scores."""
    if not len(scores):
        raise ValueError("no tokens scored, wanted at least one")
    return Evaluation(
        tokens=len(scores),
        windows=windows,
        context=context,
        perplexity=exponential(mean(scores.loss)),
        divergence=_divergence(scores) if len(scores.base_loss) else None,
    )


def _divergence(scores: Scores) -> Divergence:
    values = scores.divergence
    change = np.exp(-scores.loss) - np.exp(-scores.base_loss)
    square = mean(change**2)
    rms = math.sqrt(square.value)
    median, ninetieth, ninety_ninth = (float(v) for v in np.quantile(values, [0.5, 0.9, 0.99]))
    return Divergence(
        base_perplexity=exponential(mean(scores.base_loss)),
        perplexity_ratio=exponential(mean(scores.loss - scores.base_loss)),
        mean=mean(values),
        median=median,
        percentile_90=ninetieth,
        percentile_99=ninety_ninth,
        maximum=float(values.max()),
        same_top=mean(scores.same_top.astype(np.float64)),
        mean_probability_change=mean(change),
        rms_probability_change=Estimate(rms, square.error / (2 * rms) if rms else 0.0),
    )
