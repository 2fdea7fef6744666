"""Repetition, presence and frequency penalties on tokens of the history."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.options import SamplingParams


def last_tokens(history: Sequence[int], count: int) -> Sequence[int]:
    """The last `count` tokens of `history`; all of them if `count` is -1."""
    if count < 0 or count >= len(history):
        return history
    return history[len(history) - count :]


def penalties_are_on(settings: SamplingParams) -> bool:
    """Whether any of the three changes a logit."""
    return settings.repeat_last_n != 0 and (
        settings.repeat_penalty != 1 or settings.presence_penalty != 0 or settings.frequency_penalty != 0
    )


def penalize_repetition(
    logits: npt.NDArray[np.float32], history: Sequence[int], settings: SamplingParams
) -> None:
    """Lower the logits (V,) of recent tokens, in place.

    A token seen `count` times in the last `repeat_last_n` has its logit divided by `repeat_penalty`
    (multiplied where negative, so that it falls too), then lowered by `count * frequency_penalty +
    presence_penalty`. Source: Keskar et al. 2019, section 4.1 (arXiv:1909.05858); the negative case
    as all current runtimes have it.
    """
    counts = Counter(last_tokens(history, settings.repeat_last_n))
    if not counts:
        return
    ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
    seen = logits[ids]
    with np.errstate(over="ignore"):  # an infinite logit raises an error in the sampler
        seen = np.where(seen > 0, seen / settings.repeat_penalty, seen * settings.repeat_penalty)
        logits[ids] = seen - times * settings.frequency_penalty - settings.presence_penalty
