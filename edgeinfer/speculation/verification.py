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

    `logits` (1 + len(draft.ids), vocabulary) float32: after the history, and after each draft token. The
    sampler has accepted all returned tokens.
    """
    best = sampler.best_of_each(logits)
    if best is not None:
        return path_of(draft, best, logits, end_ids)
    text, tokens = list(history), list[SampledToken]()
    row: int | None = 0
    while row is not None:
        if draft.distributions is None or row == len(draft.ids):
            sampled = sampler.sample(logits[row], text)
        else:
            target = sampler.distribution(logits[row], text)
            sampled = _accepted_or_resampled(draft.ids[row], draft.distributions[row], target, sampler)
        sampler.accept(sampled)
        text.append(sampled)
        node = draft.child(row - 1, sampled)
        tokens.append(SampledToken(sampled, logits[row], node is not None))
        row = None if node is None or sampled in end_ids else 1 + node
    return tokens


def path_of(
    draft: Draft,
    following: Sequence[int],
    logits: npt.NDArray[np.float32] | None,
    end_ids: Collection[int],
) -> list[SampledToken]:
    """The tokens after the history, up to the first that wasn't drafted: `following` has those after it and
    after each draft token. `logits` None: they are on the device.
    """
    tokens: list[SampledToken] = []  # `list[SampledToken]()` takes 15 times as long
    row = 0
    while True:
        token, node = following[row], draft.child(row - 1, following[row])
        tokens.append(SampledToken(token, None if logits is None else logits[row], node is not None))
        if node is None or token in end_ids:
            return tokens
        row = 1 + node


def accepted_path(draft: Draft, tokens: Sequence[SampledToken]) -> list[int]:
    """The indices of the draft's tokens that were accepted, in the order of the text."""
    path, node = list[int](), -1
    for token in tokens:
        found = draft.child(node, token.id) if token.drafted else None
        if found is None:
            break
        path.append(node := found)
    return path


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
