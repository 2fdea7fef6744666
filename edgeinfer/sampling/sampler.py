"""The sampler chain: from logits to a distribution, and from a distribution to a token."""

import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import LogitsError, SettingError
from edgeinfer.sampling import truncation
from edgeinfer.sampling.allowed import Constraint, Ids, Logits, allowed_of
from edgeinfer.sampling.candidates import Floats, Positions
from edgeinfer.sampling.dry import SequenceBreakers, dry_penalties
from edgeinfer.sampling.penalties import penalize_repetition, penalties_are_on
from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.sampling.shortlist import Shortlist

Probabilities = npt.NDArray[np.float64]
Distribution = tuple[Ids, Probabilities]

COLDEST = 1e-30
"""Minimum temperature by which a float32 can be divided; only the maximum and its equals survive it."""


@dataclass(frozen=True)
class SamplerState:
    """The mutable state of a sampler."""

    random: dict[str, Any]
    surprise_limit: float
    coming: tuple[float, ...] = ()


class Sampler:
    """Samples the next token of one stream.

    `token_bytes` (token id -> its bytes) lets DRY find its sequence breakers. `seed` holds the seed in use,
    random if the settings have none. `constraint` excludes tokens before all other steps. It is updated by
    `accept`, but isn't part of `snapshot`.

    Raises:
        SettingError: a logit bias for a token that isn't in the vocabulary.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        vocabulary_size: int,
        token_bytes: Callable[[int], bytes] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.settings = settings
        self.constraint = constraint
        self.vocabulary_size = vocabulary_size
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._coming: deque[float] = deque()
        """Uniforms that were read ahead and aren't used yet."""
        self._surprise_limit = 2 * settings.mirostat_tau
        self._last: Distribution | None = None
        self._breakers = SequenceBreakers(settings.dry_sequence_breakers, token_bytes)
        self._truncations = _active_truncations(settings)
        self._penalizes = penalties_are_on(settings)
        self._all_alike = not (self._penalizes or settings.dry_multiplier > 0 or settings.logit_bias)
        """Whether the logits of allowed tokens are used unmodified."""
        self._shortlists = settings.mirostat == 0 and settings.top_k > 0 and settings.typical_p == 1
        """Whether the candidates are a prefix of the allowed tokens in falling order."""
        self._all_asked = settings.temperature > 0 and not self._shortlists
        """Whether the last sample needed all allowed tokens."""
        beyond = [token_id for token_id in settings.logit_bias if token_id >= vocabulary_size]
        if beyond:
            raise SettingError(f"logit_bias: saw token id {beyond[0]}, wanted 0 to {vocabulary_size - 1}")

    def begin(self) -> None:
        """Hint that `sample` is called soon, for the token after those accepted so far."""
        if self.constraint and self._all_asked:
            self.constraint.begin()

    def sample(self, logits: Logits, history: Sequence[int]) -> int:
        """Sample one token id from `distribution(logits, history)`; call `accept` if it is kept.

        At a temperature of 0 no uniform is used.
        """
        if self.settings.temperature == 0:
            self._last = None
            return self._in_time(self.best(logits, history))
        ids, probabilities = self.distribution(logits, history)
        return self._in_time(int(ids[self.draw(probabilities)]))

    def _in_time(self, token_id: int) -> int:
        """The sampled token, or one that completes the text in time, unless a bias bans it."""
        if self.constraint is None:
            return token_id
        found = self.constraint.in_time(token_id)
        return token_id if self.settings.logit_bias.get(found) == -math.inf else found

    def draw(self, probabilities: Probabilities) -> int:
        """A position sampled from `probabilities`; advances the random state by one number."""
        chance = self.uniform()
        if probabilities.size == 1:
            return 0
        cumulative = np.cumsum(probabilities)
        position = int(np.searchsorted(cumulative, chance * cumulative[-1], side="right"))
        return min(position, probabilities.size - 1)

    def uniform(self) -> float:
        """A uniform in [0, 1) from the sampler's random state. Used for sampling, and for accepting or
        rejecting draft tokens.
        """
        return self._coming.popleft() if self._coming else float(self._random.random())

    def coming(self, place: int) -> float:
        """The value that `uniform` returns after `place` further calls; for sampling elsewhere that may be
        discarded.
        """
        while len(self._coming) <= place:
            self._coming.append(float(self._random.random()))
        return self._coming[place]

    def distribution(self, logits: Logits, history: Sequence[int]) -> Distribution:
        """The distribution that `sample` uses.

        `logits` (V,) float32; `history` the ids so far, prompt included. Returns the ids of the remaining
        candidates, rising, and their probabilities (float64, all above 0, sum 1). XTC's random decision is
        part of the distribution, so the same arguments give the same result.

        Raises:
            LogitsError: a NaN or +inf among the logits, or not one finite.
        """
        if self.settings.temperature == 0:
            self._last = np.array([self.best(logits, history)]), np.ones(1)
            return self._last
        self._last = self._distribution(self._adjusted(logits, history))
        return self._last

    def best(self, logits: Logits, history: Sequence[int]) -> int:
        """The most probable token after all chain steps before the temperature.

        Raises: as `distribution`.
        """
        adjusted = self._adjusted(logits, history)
        best = int(adjusted.argmax())  # NaN is the maximum, if there is one
        usable = math.isfinite(adjusted[best])
        self._all_asked = self.constraint is not None and not (usable and self.constraint.allows(best))
        if self.constraint and self._all_asked:
            ids, allowed = allowed_of(adjusted, self.constraint)
            place = int(allowed.argmax())
            best, usable = place if ids is None else int(ids[place]), math.isfinite(allowed[place])
        if not usable:
            raise _unusable(adjusted, self.constraint)
        return best

    def best_of_each(self, logits: Logits) -> list[int] | None:
        """`sample` for every row of `logits` (rows, V), if it doesn't depend on the previous rows: no
        uniforms and unmodified logits. None: rows have to be sampled one by one.

        Raises: as `distribution`.
        """
        if self.settings.temperature != 0 or not self._all_alike or self.constraint:
            return None
        self._last = None
        best: list[int] = logits.argmax(axis=1).tolist()
        for row, found in enumerate(best):
            if not math.isfinite(logits.item(row, found)):
                raise _unusable(logits[row])
        return best

    def take(self, token_id: int) -> bool:
        """Accept the only allowed token, as if it had been sampled; False: a bias bans it."""
        if self.settings.logit_bias.get(token_id) == -math.inf:
            return False
        self._last = None
        if self.settings.temperature > 0:
            self.uniform()
            self._last = np.array([token_id]), np.ones(1)
        self.accept(token_id)
        return True

    def accept(self, token_id: int) -> None:
        """Record that `token_id` was kept from the last distribution; Mirostat updates its surprise limit."""
        if self.constraint:
            self.constraint.accept(token_id)
        if self.settings.mirostat != 2 or self._last is None:
            return
        ids, probabilities = self._last
        position = int(np.searchsorted(ids, token_id))
        if position == ids.size or ids[position] != token_id:
            return
        surprise = -math.log2(probabilities[position])
        self._surprise_limit -= self.settings.mirostat_eta * (surprise - self.settings.mirostat_tau)

    def snapshot(self) -> SamplerState:
        """The state to restore if the following tokens are rejected."""
        random = dict(self._random.bit_generator.state)
        return SamplerState(random, self._surprise_limit, tuple(self._coming))

    def restore(self, state: SamplerState) -> None:
        """Restore a state from `snapshot`."""
        self._random.bit_generator.state = state.random
        self._coming = deque(state.coming)
        self._surprise_limit = state.surprise_limit
        self._last = None

    def _adjusted(self, logits: Logits, history: Sequence[int]) -> Logits:
        """The logits of all tokens after bias, penalties and DRY; the argument isn't modified."""
        settings = self.settings
        if logits.shape != (self.vocabulary_size,):
            raise LogitsError(f"logits: saw shape {logits.shape}, wanted ({self.vocabulary_size},)")
        if self._all_alike:
            return logits
        penalized = self._penalizes and len(history) > 0
        repeated = dry_penalties(history, settings, self._breakers) if settings.dry_multiplier > 0 else {}
        if not (penalized or repeated or settings.logit_bias):
            return logits
        adjusted = logits.copy()
        for token_id, bias in settings.logit_bias.items():
            adjusted[token_id] += bias
        if penalized:
            penalize_repetition(adjusted, history, settings)
        for token_id, penalty in repeated.items():
            adjusted[token_id] -= penalty
        return adjusted

    def _distribution(self, adjusted: Logits) -> Distribution:
        """Steps 4 to 9 of the chain, or Mirostat, on the logits of all tokens."""
        ids, allowed, constraint = None, adjusted, self.constraint
        if constraint:
            # If the last sample needed all allowed tokens, the next one usually does too.
            ids = constraint.few() if self._all_asked else None
            if ids is None:
                kept = self._shortlisted(adjusted, constraint)
                if kept is not None:
                    return self._softened(adjusted[kept], kept)
                ids, allowed = allowed_of(adjusted, constraint)
            else:
                allowed = adjusted[ids]
        if not math.isfinite(allowed.max()):
            raise _unusable(adjusted, constraint)
        if ids is not None and ids.size == 1:
            return ids, np.ones(1)
        if self.settings.mirostat == 2:
            return self._below_surprise_limit(allowed, ids)
        return self._truncated(allowed, ids)

    def _shortlisted(self, logits: Logits, constraint: Constraint) -> Ids | None:
        """The allowed tokens that remain after steps 4 to 7, rising; None: these steps need all
        allowed tokens.
        """
        if not self._shortlists:
            return None
        found = None
        if math.isfinite(logits.max()):
            settings = self.settings
            found = Shortlist(logits, settings.top_k, constraint.allows).kept(settings.top_p, settings.min_p)
        self._all_asked = found is None
        return found

    def _truncated(self, logits: Logits, ids: Ids | None) -> Distribution:
        """Steps 4 to 9 of the chain, on the logits (n,) of the tokens `ids`, or of all."""
        settings = self.settings
        if self._shortlists:
            kept = Shortlist(logits, settings.top_k).kept(settings.top_p, settings.min_p)
            if kept is not None:
                return self._softened(logits[kept], kept if ids is None else ids[kept])
        if ids is None and not self._truncations:
            ids = np.arange(logits.size)
        for keep in self._truncations:
            positions = keep(logits)
            logits = logits[positions]
            ids = positions if ids is None else ids[positions]
        assert ids is not None
        return self._softened(logits, ids)

    def _softened(self, logits: Logits, ids: Ids) -> Distribution:
        """Steps 8 and 9 of the chain."""
        temperature, chance = self.settings.temperature, self.settings.xtc_probability
        probabilities = _softened(logits, temperature)
        if chance > 0:
            spared = truncation.xtc(logits, self.settings.xtc_threshold)
            probabilities *= 1 - chance
            probabilities[spared] += chance * _softened(logits[spared], temperature)
        return _possible(ids, probabilities)

    def _below_surprise_limit(self, logits: Logits, ids: Ids | None) -> Distribution:
        """Mirostat 2: exclude tokens whose surprise in bits exceeds the running limit.

        Source: Basu et al. 2021, algorithm 2 (arXiv:2007.14966).
        """
        probabilities = _softened(logits, self.settings.temperature)
        positions = np.flatnonzero(probabilities >= 2.0**-self._surprise_limit)
        if positions.size == 0:
            positions = np.array([probabilities.argmax()])
        return _possible(positions if ids is None else ids[positions], probabilities[positions])


def _active_truncations(settings: SamplerSettings) -> list[Callable[[Floats], Positions]]:
    """Steps 4 to 7 of the chain, without disabled ones."""
    active: list[Callable[[Floats], Positions]] = []
    if settings.top_k > 0:
        active.append(lambda logits: truncation.top_k(logits, settings.top_k))
    if settings.typical_p < 1:
        active.append(lambda logits: truncation.typical(logits, settings.typical_p))
    if settings.top_p < 1:
        active.append(lambda logits: truncation.top_p(logits, settings.top_p))
    if settings.min_p > 0:
        active.append(lambda logits: truncation.min_p(logits, settings.min_p))
    return active


def _softened(logits: Logits, temperature: float) -> Probabilities:
    """Softmax of logits over temperature; the peak is subtracted first, so no temperature overflows."""
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - logits.max()) / max(temperature, COLDEST))
    return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)


def _possible(ids: Ids, probabilities: Probabilities) -> Distribution:
    """The candidates with a probability above 0, normalized."""
    possible = probabilities > 0
    if not possible.all():
        ids, probabilities = ids[possible], probabilities[possible]
    return ids, probabilities / probabilities.sum()


def _unusable(logits: Logits, constraint: Constraint | None = None) -> LogitsError:
    if constraint:
        logits = np.where(constraint.allowed(), logits, np.float32(-np.inf))
    peak = float(logits.max())
    if math.isnan(peak):
        broken = np.flatnonzero(np.isnan(logits))
        return LogitsError(
            f"logits: saw NaN for {broken.size} of {logits.size} tokens (first: token {broken[0]}), "
            "wanted numbers; the model file may be damaged"
        )
    if peak > 0:
        return LogitsError(f"logits: saw +inf for token {int(logits.argmax())}, wanted finite numbers")
    return LogitsError(f"logits: saw -inf for all {logits.size} tokens, wanted at least one that may be said")
