"""Verification of draft tokens: the output has exactly the distribution of baseline decoding.

A token that was sampled from q is accepted with probability min(1, p/q); a rejected one is replaced by a
sample from the normalized positive part of p - q. Source: Leviathan et al. 2023, section 2.3
(arXiv:2211.17192). A draft token that was not sampled needs no such rule: a token is sampled from p as usual,
and the draft token is accepted if it is the same. Every sample then equals that of baseline decoding.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.generation.loop import SampledToken
from edgeinfer.sampling import Sampler
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafter import Draft


def verify(
    draft: Draft,
    logits: npt.NDArray[np.float32],
    history: Sequence[int],
    sampler: Sampler,
    end_ids: Collection[int],
) -> list[SampledToken]:
    """The tokens after `history`: the accepted draft tokens, and one more unless one of them is an end token.

    `logits` (1 + len(draft.ids) + siblings, vocabulary) float32: after the history, after each draft token,
    and after each sibling. The sampler has accepted all returned tokens.
    """
    siblings = draft.sibling_tokens
    best = None if siblings else sampler.best_of_each(logits)
    if best is not None:
        return greedy_prefix(draft.ids, best, logits, end_ids)
    text = list(history)
    tokens: list[SampledToken] = []
    for index in range(len(draft.ids) + 1):
        drafted = draft.ids[index] if index < len(draft.ids) else None
        if drafted is None or draft.distributions is None:
            sampled = sampler.sample(logits[index], text)
        else:
            target = sampler.distribution(logits[index], text)
            sampled = _accepted_or_resampled(drafted, draft.distributions[index], target, sampler)
        sampler.accept(sampled)
        text.append(sampled)
        is_sibling = (index, sampled) in siblings
        tokens.append(SampledToken(sampled, logits[index], is_sibling or sampled == drafted))
        if is_sibling and sampled not in end_ids:
            row = logits[1 + len(draft.ids) + siblings.index((index, sampled))]
            following = sampler.sample(row, text)
            sampler.accept(following)
            tokens.append(SampledToken(following, row))
        if sampled != drafted or sampled in end_ids:
            break
    return tokens


def greedy_prefix(
    draft_ids: Sequence[int],
    best: Sequence[int],
    logits: npt.NDArray[np.float32] | None,
    end_ids: Collection[int],
) -> list[SampledToken]:
    """The best tokens after the history and after each draft token, up to the first that differs from the
    draft. `logits` None: they are on the device.
    """
    tokens: list[SampledToken] = []
    for index, token in enumerate(best):
        is_drafted = index < len(draft_ids) and token == draft_ids[index]
        tokens.append(SampledToken(token, None if logits is None else logits[index], is_drafted))
        if not is_drafted or token in end_ids:
            break
    return tokens


def accepted_sibling(draft: Draft, tokens: Sequence[SampledToken]) -> int | None:
    """The index of the sibling that was accepted with a token after it; None: all tokens are on the trunk."""
    index = len(tokens) - 2
    if index < 0 or not tokens[index].drafted or index >= len(draft.ids):
        return None
    token = tokens[index].id
    return None if token == draft.ids[index] else draft.sibling_tokens.index((index, token))


def _acceptance(drafted: int, source: Distribution, target: Distribution) -> float:
    """min(1, p/q): the acceptance probability of a token sampled from `source` for `target`."""
    p, q = _prob_of(drafted, target), _prob_of(drafted, source)
    return min(1.0, p / q) if q > 0 else float(p > 0)


def _accepted_or_resampled(drafted: int, source: Distribution, target: Distribution, sampler: Sampler) -> int:
    """The draft token, or a sample from the positive part of `target` minus `source`."""
    if sampler.uniform() < _acceptance(drafted, source, target):
        return drafted
    ids, probs = target
    excess = np.maximum(probs - _probs_of(ids, source), 0.0)
    if not excess.any():  # p equals q except for rounding, and the uniform was at the boundary
        excess = probs
    return int(ids[sampler.sample_index(excess / excess.sum())])


def _prob_of(token_id: int, distribution: Distribution) -> float:
    ids, probs = distribution
    index = int(ids.searchsorted(token_id))
    return float(probs[index]) if index < len(ids) and ids[index] == token_id else 0.0


def _probs_of(token_ids: npt.NDArray[np.int64], distribution: Distribution) -> npt.NDArray[np.float64]:
    """The probabilities of some ids; 0 for impossible ones. A distribution's ids are rising."""
    ids, probs = distribution
    indices = np.minimum(np.searchsorted(ids, token_ids), len(ids) - 1)
    return np.where(ids[indices] == token_ids, probs[indices], 0.0)
