"""Verification of draft tokens: the output has exactly the distribution of baseline decoding.

A token that was sampled from q is accepted with probability min(1, p/q); a rejected one is replaced by a
sample from the normalized positive part of p - q. Source: Leviathan et al. 2023, section 2.3
(arXiv:2211.17192). A draft token that was not sampled needs no such rule: a token is sampled from p as usual,
and the draft token is accepted if it is the same. Every sample then equals that of baseline decoding.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.sampling import Sampler
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafts import Draft


def verify(
    draft: Draft,
    logits: npt.NDArray[np.float32],
    history: Sequence[int],
    sampler: Sampler,
    end_ids: Collection[int],
) -> list[SampledToken]:
    """The tokens after `history`: the accepted draft tokens, and one more unless one of them is an end token.

    `logits` (1 + len(draft.ids) + len(draft.leaves), vocabulary) float32: after the history, after each draft
    token, and after each sibling. The sampler has accepted all returned tokens.
    """
    leaves = draft.leaves
    best = None if leaves else sampler.best_of_each(logits)
    if best is not None:
        return _as_far_as_best(draft.ids, best, logits, end_ids)
    said = list(history)
    found: list[SampledToken] = []
    for index in range(len(draft.ids) + 1):
        guess = draft.ids[index] if index < len(draft.ids) else None
        if guess is None or draft.distributions is None:
            chosen = sampler.sample(logits[index], said)
        else:
            wanted = sampler.distribution(logits[index], said)
            chosen = _kept_or_drawn(guess, draft.distributions[index], wanted, sampler)
        sampler.accept(chosen)
        said.append(chosen)
        leaf = (index, chosen) in leaves
        found.append(SampledToken(chosen, logits[index], leaf or chosen == guess))
        if leaf and chosen not in end_ids:
            behind = logits[1 + len(draft.ids) + leaves.index((index, chosen))]
            following = sampler.sample(behind, said)
            sampler.accept(following)
            found.append(SampledToken(following, behind))
        if chosen != guess or chosen in end_ids:
            break
    return found


def _as_far_as_best(
    guesses: Sequence[int],
    best: Sequence[int],
    logits: npt.NDArray[np.float32],
    end_ids: Collection[int],
) -> list[SampledToken]:
    """The best tokens after the history and after each draft token, up to the first that differs
    from the draft.
    """
    found: list[SampledToken] = []
    for index, chosen in enumerate(best):
        guessed = index < len(guesses) and chosen == guesses[index]
        found.append(SampledToken(chosen, logits[index], guessed))
        if not guessed or chosen in end_ids:
            break
    return found


def leaf_taken(draft: Draft, found: Sequence[SampledToken]) -> int | None:
    """The index of the sibling that was accepted with a token after it; None: all tokens are on the trunk."""
    place = len(found) - 2
    if place < 0 or not found[place].drafted or place >= len(draft.ids):
        return None
    taken = found[place].id
    return None if taken == draft.ids[place] else draft.leaves.index((place, taken))


def _standing_chance(guess: int, drawn_from: Distribution, wanted: Distribution) -> float:
    """min(1, p/q): the acceptance probability of a token sampled from one distribution for another."""
    p, q = _chance_of(guess, wanted), _chance_of(guess, drawn_from)
    return min(1.0, p / q) if q > 0 else float(p > 0)


def _kept_or_drawn(guess: int, drawn_from: Distribution, wanted: Distribution, sampler: Sampler) -> int:
    """The draft token, or a sample from the positive part of `wanted` minus `drawn_from`."""
    if sampler.uniform() < _standing_chance(guess, drawn_from, wanted):
        return guess
    ids, chances = wanted
    over = np.maximum(chances - _chances_of(ids, drawn_from), 0.0)
    if not over.any():  # p equals q except for rounding, and the uniform was at the boundary
        over = chances
    return int(ids[sampler.draw(over / over.sum())])


def _chance_of(token_id: int, distribution: Distribution) -> float:
    ids, chances = distribution
    place = int(ids.searchsorted(token_id))
    return float(chances[place]) if place < len(ids) and ids[place] == token_id else 0.0


def _chances_of(wanted: npt.NDArray[np.int64], distribution: Distribution) -> npt.NDArray[np.float64]:
    """The probabilities of some ids; 0 for impossible ones. A distribution's ids are rising."""
    ids, chances = distribution
    places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[places] == wanted, chances[places], 0.0)
