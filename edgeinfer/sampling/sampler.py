"""The sampler chain: from logits to a distribution, and from a distribution to a token."""

import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from edgeinfer.errors import LogitsError, SettingError
from edgeinfer.options import SamplingParams
from edgeinfer.sampling.allowed import Constraint, Ids, Logits, allowed_of
from edgeinfer.sampling.candidates import Floats, Positions, tempered_softmax
from edgeinfer.sampling.chain import Probabilities, Stage, StepContext, active_steps
from edgeinfer.sampling.dry import SequenceBreakers
from edgeinfer.sampling.shortlist import allowed_shortlist

Distribution = tuple[Ids, Probabilities]


@dataclass(frozen=True)
class SamplerState:
    """The mutable state of a sampler."""

    random: dict[str, Any]
    surprise_limit: float
    peeked: tuple[float, ...] = ()


class Sampler:
    """Samples the next token of one stream.

    `token_bytes` (token id -> its bytes) lets DRY find its sequence breakers. `seed` holds the seed in use,
    random if the settings have none. `constraint` excludes tokens before all other steps. It is updated by
    `accept`, but isn't part of `snapshot`. `stages`: the stages of the chain that are applied; None: all.

    Raises:
        SettingError: a logit bias for a token that isn't in the vocabulary.
    """

    def __init__(
        self,
        settings: SamplingParams,
        vocabulary_size: int,
        token_bytes: Callable[[int], bytes] | None = None,
        constraint: Constraint | None = None,
        stages: Collection[Stage] | None = None,
    ) -> None:
        self.settings = settings
        self.constraint = constraint
        self.vocabulary_size = vocabulary_size
        self.seed = secrets.randbits(32) if settings.seed is None else settings.seed
        self._peeked: deque[float] = deque()
        """Uniforms that were read ahead and aren't used yet."""
        self._last: Distribution | None = None
        self._context = StepContext(
            settings,
            SequenceBreakers(settings.dry_sequence_breakers, token_bytes),
            surprise_limit=2 * settings.mirostat_tau,
        )
        steps = [step for step in active_steps(settings) if stages is None or step.stage in stages]
        self._adjusting = [step.function for step in steps if step.stage == "adjust"]
        self._reweighting = [step.function for step in steps if step.stage == "reweight"]
        truncations = [step for step in steps if step.stage == "truncate"]
        self._truncating = [step.function for step in truncations]
        self._shortlists = (
            bool(truncations)
            and truncations[0].name == "top_k"
            and all(step.keeps_prefix for step in truncations)
        )
        """Whether the candidates are a prefix of at most `top_k` allowed tokens in falling order."""
        self._learns_surprise = any(step.name == "mirostat" for step in steps)
        self._all_needed = settings.temperature > 0 and not self._shortlists
        """Whether the last sample needed all allowed tokens."""
        beyond = [token_id for token_id in settings.logit_bias if token_id >= vocabulary_size]
        if beyond:
            raise SettingError(f"logit_bias: saw token id {beyond[0]}, wanted 0 to {vocabulary_size - 1}")

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made when it is first used, as it takes a tenth of a small model's step: greedily it never is."""
        return np.random.Generator(np.random.PCG64(self.seed))

    def begin(self) -> None:
        """Hint that `sample` is called soon, for the token after those accepted so far."""
        if self.constraint and self._all_needed:
            self.constraint.begin()

    def sample(self, logits: Logits, history: Sequence[int]) -> int:
        """Sample one token id from `distribution(logits, history)`; call `accept` if it is kept.

        At a temperature of 0 no uniform is used.
        """
        if self.settings.temperature == 0:
            self._last = None
            return self._token_or_ending(self.best(logits, history))
        ids, probabilities = self.distribution(logits, history)
        return self._token_or_ending(int(ids[self.sample_index(probabilities)]))

    def _token_or_ending(self, token_id: int) -> int:
        """The sampled token, or one that completes the text in time, unless a bias bans it."""
        if self.constraint is None:
            return token_id
        token = self.constraint.token_or_ending(token_id)
        return token_id if self.settings.logit_bias.get(token) == -math.inf else token

    def sample_index(self, probabilities: Probabilities) -> int:
        """A position sampled from `probabilities`; advances the random state by one number."""
        uniform = self.uniform()
        if probabilities.size == 1:
            return 0
        cumulative = np.cumsum(probabilities)
        position = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return min(position, probabilities.size - 1)

    def uniform(self) -> float:
        """A uniform in [0, 1) from the sampler's random state. Used for sampling, and for accepting or
        rejecting draft tokens.
        """
        return self._peeked.popleft() if self._peeked else float(self._random.random())

    def peek_uniform(self, ahead: int) -> float:
        """The value that `uniform` returns after `ahead` further calls; for sampling elsewhere that may be
        discarded.
        """
        while len(self._peeked) <= ahead:
            self._peeked.append(float(self._random.random()))
        return self._peeked[ahead]

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
        self._last = self._distribution(self.adjusted(logits, history))
        return self._last

    def best(self, logits: Logits, history: Sequence[int]) -> int:
        """The most probable token after all chain steps before the temperature.

        Raises: as `distribution`.
        """
        adjusted = self.adjusted(logits, history)
        best = int(adjusted.argmax())  # NaN is the maximum, if there is one
        usable = math.isfinite(adjusted[best])
        self._all_needed = self.constraint is not None and not (usable and self.constraint.allows(best))
        if self.constraint and self._all_needed:
            ids, allowed = allowed_of(adjusted, self.constraint)
            index = int(allowed.argmax())
            best, usable = index if ids is None else int(ids[index]), math.isfinite(allowed[index])
        if not usable:
            raise _unusable_logits_error(adjusted, self.constraint)
        return best

    @property
    def takes_best(self) -> bool:
        """Whether its samples are the largest of the unmodified logits; then `accept` changes nothing."""
        return self.settings.temperature == 0 and not self._adjusting and not self.constraint

    def best_of_each(self, logits: Logits) -> list[int] | None:
        """`sample` for every row of `logits` (rows, V), if it doesn't depend on the previous rows: no
        uniforms and unmodified logits. None: rows have to be sampled one by one.

        Raises: as `distribution`.
        """
        if not self.takes_best:
            return None
        self._last = None
        best: list[int] = logits.argmax(axis=1).tolist()
        for row, best_id in enumerate(best):
            if not math.isfinite(logits.item(row, best_id)):
                raise _unusable_logits_error(logits[row])
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
        if not self._learns_surprise or self._last is None:
            return
        ids, probabilities = self._last
        position = int(np.searchsorted(ids, token_id))
        if position == ids.size or ids[position] != token_id:
            return
        surprise = -math.log2(probabilities[position])
        self._context.surprise_limit -= self.settings.mirostat_eta * (surprise - self.settings.mirostat_tau)

    def snapshot(self) -> SamplerState:
        """The state to restore if the following tokens are rejected."""
        random = dict(self._random.bit_generator.state)
        return SamplerState(random, self._context.surprise_limit, tuple(self._peeked))

    def restore(self, state: SamplerState) -> None:
        """Restore a state from `snapshot`."""
        self._random.bit_generator.state = state.random
        self._peeked = deque(state.peeked)
        self._context.surprise_limit = state.surprise_limit
        self._last = None

    def adjusted(self, logits: Logits, history: Sequence[int]) -> Logits:
        """The logits of all tokens after bias, penalties and DRY; the argument isn't modified."""
        if logits.shape != (self.vocabulary_size,):
            raise LogitsError(f"logits: saw shape {logits.shape}, wanted ({self.vocabulary_size},)")
        if not self._adjusting:
            return logits
        adjusted = logits.copy()
        self._context.history = history
        for adjust in self._adjusting:
            adjust(adjusted, self._context)
        return adjusted

    def _distribution(self, adjusted: Logits) -> Distribution:
        """The chain from truncation on, on the logits of all tokens."""
        ids, allowed, constraint = None, adjusted, self.constraint
        if constraint:
            # If the last sample needed all allowed tokens, the next one usually does too.
            ids = constraint.few() if self._all_needed else None
            if ids is None:
                kept = self._shortlisted(adjusted, constraint)
                if kept is not None:
                    return self._reweighted(adjusted[kept], kept)
                ids, allowed = allowed_of(adjusted, constraint)
            else:
                allowed = adjusted[ids]
        if not math.isfinite(allowed.max()):
            raise _unusable_logits_error(adjusted, constraint)
        if ids is not None and ids.size == 1:
            return ids, np.ones(1)
        kept = self._truncated(allowed)
        if kept is None:
            return self._reweighted(allowed, np.arange(allowed.size) if ids is None else ids)
        return self._reweighted(allowed[kept], kept if ids is None else ids[kept])

    def _shortlisted(self, logits: Logits, constraint: Constraint) -> Ids | None:
        """The allowed tokens that remain after truncation, rising; None: all allowed tokens are needed."""
        if not self._shortlists:
            return None
        positions = None
        if math.isfinite(logits.max()):
            positions = allowed_shortlist(
                logits, self.settings.top_k, self._truncated_positions, constraint.allows
            )
        self._all_needed = positions is None
        return positions

    def _truncated(self, logits: Floats) -> Positions | None:
        """The positions that remain of the logits (n,) after truncation, rising; None: all."""
        positions: Positions | None = None
        for truncate in self._truncating:
            kept: Positions = truncate(logits, self.settings)
            logits = logits[kept]
            positions = kept if positions is None else positions[kept]
        return positions

    def _truncated_positions(self, logits: Floats) -> Positions:
        positions = self._truncated(logits)
        assert positions is not None, "top-k is active"
        return positions

    def _reweighted(self, logits: Logits, ids: Ids) -> Distribution:
        """The distribution of the remaining candidates: temperature, then the steps after it."""
        probabilities = tempered_softmax(logits, self.settings.temperature)
        for reweight in self._reweighting:
            probabilities = reweight(probabilities, logits, self._context)
        return _possible(ids, probabilities)


def _possible(ids: Ids, probabilities: Probabilities) -> Distribution:
    """The candidates with a probability above 0, normalized."""
    possible = probabilities > 0
    if not possible.all():
        ids, probabilities = ids[possible], probabilities[possible]
    return ids, probabilities / probabilities.sum()


def _unusable_logits_error(logits: Logits, constraint: Constraint | None = None) -> LogitsError:
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
    return LogitsError(f"logits: saw -inf for all {logits.size} tokens, wanted at least one allowed token")
