"""The sampler chain: each sampler is one function and one line of `CHAIN`, which is the only list of them.

A new sampler runs on the host until its line declares that a device or the native draft loop implements it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer.options import SamplingParams
from edgeinfer.sampling.candidates import Floats, Positions, highest, softmax, tempered_softmax
from edgeinfer.sampling.dry import SequenceBreakers, dry_penalties
from edgeinfer.sampling.penalties import penalize_repetition, penalties_are_on

Probabilities = npt.NDArray[np.float64]
Stage = Literal["adjust", "truncate", "reweight"]

BUCKETS = 4096
FEW = 512
"""Up to this many candidates, sorting is faster than summing by buckets."""
WIDEST = 32.0
"""Span of the buckets in nats; candidates further below the best share the last one."""


@dataclass
class StepContext:
    """What a sampler may read besides the logits."""

    params: SamplingParams
    breakers: SequenceBreakers
    history: Sequence[int] = ()
    """The ids so far, prompt included."""
    surprise_limit: float = math.inf
    """Mirostat's running limit in bits."""


@dataclass(frozen=True)
class SamplerStep:
    """A sampler and its declaration. `function` is one of three kinds:

    - "adjust": (logits, context), modifies the logits (V,) float32 of all tokens in place;
    - "truncate": (logits, params), returns the positions to keep of the logits (n,) of the remaining
      candidates, rising, at least one;
    - "reweight", after the temperature: (probabilities, logits, context), returns the new probabilities (n,)
      of the remaining candidates; 0 excludes a candidate.
    """

    name: str
    stage: Stage
    function: Callable[..., Any]
    is_active: Callable[[SamplingParams], bool]
    on_device: bool = False
    """Whether the GPU's sampler implements it."""
    in_draft_loop: bool = False
    """Whether the native draft loop implements it."""
    keeps_prefix: bool = False
    """Whether it keeps the first m candidates in falling order, where m doesn't fall if candidates are
    appended."""
    replaces_later: bool = False
    """Whether it replaces all other steps after "adjust"."""


def active_steps(params: SamplingParams) -> list[SamplerStep]:
    """The steps that affect the sampled token, in chain order. At a temperature of 0 truncation has no
    effect.
    """
    active = [step for step in CHAIN if step.is_active(params)]
    adjusting = [step for step in active if step.stage == "adjust"]
    if params.temperature == 0:
        return adjusting
    replacing = [step for step in active if step.replaces_later]
    return adjusting + replacing if replacing else active


def add_bias(logits: npt.NDArray[np.float32], context: StepContext) -> None:
    """Add the biases to the logits of single tokens."""
    for token_id, bias in context.params.logit_bias.items():
        logits[token_id] += bias


def penalize(logits: npt.NDArray[np.float32], context: StepContext) -> None:
    """Repetition, presence and frequency penalties."""
    penalize_repetition(logits, context.history, context.params)


def dry(logits: npt.NDArray[np.float32], context: StepContext) -> None:
    """Lower the logits of tokens that would extend a repetition."""
    for token_id, penalty in dry_penalties(context.history, context.params, context.breakers).items():
        logits[token_id] -= penalty


def top_n_sigma(logits: Floats, n: float) -> Positions:
    """The logits at most `n` standard deviations below the best. Source: arXiv:2411.07641."""
    deviation = logits[np.isfinite(logits)].std(dtype=np.float64)
    return np.flatnonzero(logits >= np.float32(logits.max() - n * deviation))


def top_k(logits: Floats, k: int) -> Positions:
    """The `k` highest logits; 0 keeps all. Source: Fan et al. 2018, section 5.4 (arXiv:1805.04833)."""
    if k == 0 or k >= logits.size:
        return np.arange(logits.size)
    kept = highest(logits, k)
    kept.sort()
    return kept


def typical(logits: Floats, share: float) -> Positions:
    """The candidates whose surprise is closest to the entropy, until they hold more than `share`.

    Source: Meister et al. 2022, section 5 (arXiv:2202.00666).
    """
    probabilities = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    possible = probabilities > 0
    entropy = float(np.sum(probabilities[possible] * surprise[possible]))
    return _smallest_set(-np.abs(surprise - entropy), probabilities, math.nextafter(share, math.inf))


def top_p(logits: Floats, share: float) -> Positions:
    """The smallest set of most probable candidates with a total probability of at least `share`.

    Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751).
    """
    return _smallest_set(logits, softmax(logits), share)


def min_p(logits: Floats, ratio: float) -> Positions:
    """The candidates at least `ratio` times as probable as the best. Source: arXiv:2407.01082."""
    if ratio == 0:
        return np.arange(logits.size)
    kept: Positions = (logits >= logits.max() + math.log(ratio)).nonzero()[0]
    return kept


def xtc_kept(logits: Floats, threshold: float) -> Positions:
    """The candidates without those of at least the probability `threshold`; the least of these stays.

    Two candidates can't both be above one half, so such a threshold has no effect.
    Source: github.com/oobabooga/text-generation-webui, pull request 6335.
    """
    probabilities = softmax(logits)
    reaching = np.flatnonzero(probabilities >= threshold)
    if threshold > 0.5 or reaching.size < 2:
        return np.arange(logits.size)
    falling = highest(probabilities[reaching], reaching.size)
    stays = np.ones(logits.size, dtype=bool)
    stays[reaching[falling[:-1]]] = False
    return np.flatnonzero(stays)


def _smallest_set(keys: Floats, probabilities: npt.NDArray[np.float64], share: float) -> Positions:
    """The smallest set of candidates with the highest keys that reaches `share` of probability, rising.

    Many candidates are summed by buckets of the key; only the bucket that reaches `share` is sorted.
    """
    if keys.size <= FEW:
        falling = highest(keys, keys.size)
        kept = falling[: int(probabilities[falling].cumsum().searchsorted(share)) + 1]
        kept.sort()
        return kept
    below_peak = (keys.max() - keys) * (BUCKETS / WIDEST)
    bucket = np.minimum(below_peak, BUCKETS - 1).astype(np.int64)
    reached_by = np.cumsum(np.bincount(bucket, weights=probabilities, minlength=BUCKETS))
    last = min(int(np.searchsorted(reached_by, share)), BUCKETS - 1)
    inside, edge = np.flatnonzero(bucket < last), np.flatnonzero(bucket == last)
    edge = edge[highest(keys[edge], edge.size)]
    missing = share - probabilities[inside].sum()
    needed = int(np.searchsorted(np.cumsum(probabilities[edge]), missing)) + 1
    return np.sort(np.concatenate([inside, edge[:needed]]))


def xtc(probabilities: Probabilities, logits: Floats, context: StepContext) -> Probabilities:
    """XTC: with some probability, the most probable candidates are excluded. Both cases are mixed by their
    probability, so that no separate random decision is needed.
    """
    share, kept = context.params.xtc_probability, xtc_kept(logits, context.params.xtc_threshold)
    probabilities *= 1 - share
    probabilities[kept] += share * tempered_softmax(logits[kept], context.params.temperature)
    return probabilities


def mirostat(probabilities: Probabilities, logits: Floats, context: StepContext) -> Probabilities:
    """Mirostat 2: exclude candidates whose surprise in bits exceeds the running limit; the best one stays.

    Source: Basu et al. 2021, algorithm 2 (arXiv:2007.14966).
    """
    kept = probabilities >= 2.0**-context.surprise_limit
    if not kept.any():
        kept[probabilities.argmax()] = True
    return np.where(kept, probabilities, 0.0)


CHAIN: tuple[SamplerStep, ...] = (
    SamplerStep("logit_bias", "adjust", add_bias, lambda p: bool(p.logit_bias)),
    SamplerStep("penalties", "adjust", penalize, penalties_are_on, on_device=True),
    SamplerStep("dry", "adjust", dry, lambda p: p.dry_multiplier > 0),
    SamplerStep(
        "top_n_sigma",
        "truncate",
        lambda logits, p: top_n_sigma(logits, p.top_n_sigma),
        lambda p: p.top_n_sigma > 0,
    ),
    SamplerStep(
        "top_k",
        "truncate",
        lambda logits, p: top_k(logits, p.top_k),
        lambda p: p.top_k > 0,
        on_device=True,
        in_draft_loop=True,
        keeps_prefix=True,
    ),
    SamplerStep(
        "typical_p", "truncate", lambda logits, p: typical(logits, p.typical_p), lambda p: p.typical_p < 1
    ),
    SamplerStep(
        "top_p",
        "truncate",
        lambda logits, p: top_p(logits, p.top_p),
        lambda p: p.top_p < 1,
        on_device=True,
        in_draft_loop=True,
        keeps_prefix=True,
    ),
    SamplerStep(
        "min_p",
        "truncate",
        lambda logits, p: min_p(logits, p.min_p),
        lambda p: p.min_p > 0,
        on_device=True,
        in_draft_loop=True,
        keeps_prefix=True,
    ),
    SamplerStep("xtc", "reweight", xtc, lambda p: p.xtc_probability > 0),
    SamplerStep("mirostat", "reweight", mirostat, lambda p: p.mirostat == 2, replaces_later=True),
)
"""All samplers in the order in which they are applied, llama.cpp's default."""
