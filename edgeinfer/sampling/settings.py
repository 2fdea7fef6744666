"""Sampler settings, validated."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from edgeinfer.errors import SettingError
from edgeinfer.plain_numbers import plain_number
from edgeinfer.shown import shown

MAX_WHOLE = 2**63 - 1
"""Integers beyond this are out of every range."""


@dataclass(frozen=True)
class Range:
    """The allowed numbers of a setting; `low` itself is excluded if `above` is set."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False

    def holds(self, value: object) -> bool:
        """Whether `value` is a number of the right type, finite and within the bounds."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        if isinstance(value, int) and abs(value) > MAX_WHOLE:
            return False
        if not math.isfinite(value) or value > self.high:
            return False
        return value > self.low if self.above else value >= self.low

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return "a finite number"
        if self.high < math.inf:
            return f"{kind} from {self.low:g} to {self.high:g}"
        return f"{kind} above {self.low:g}" if self.above else f"{kind} of at least {self.low:g}"


RANGES: dict[str, Range] = {
    "temperature": Range(0),
    "top_k": Range(0, whole=True),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1),
    "repeat_penalty": Range(0, above=True),
    "repeat_last_n": Range(-1, whole=True),
    "presence_penalty": Range(),
    "frequency_penalty": Range(),
    "dry_multiplier": Range(0),
    "dry_base": Range(1),
    "dry_allowed_length": Range(1, whole=True),
    "dry_penalty_last_n": Range(-1, whole=True),
    "xtc_probability": Range(0, 1),
    "xtc_threshold": Range(0, 1),
    "mirostat_tau": Range(0, above=True),
    "mirostat_eta": Range(0),
}


@dataclass(frozen=True)
class SamplerSettings:
    """Sampling parameters; the defaults are llama.cpp's.

    `repeat_last_n` and `dry_penalty_last_n` count tokens back from the end; 0 disables the penalty, -1 uses
    the whole history. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 are off. `logit_bias` maps a token id
    to the value added to its logit; `-inf` bans the token. `seed` None uses a random one.

    Raises:
        SettingError: a value out of range; the message has the setting, its value and the allowed range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (*RANGES, "mirostat", "seed"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if not allowed.holds(value):
                raise SettingError(f"{name}: saw {shown(value)}, wanted {allowed}")
        if not Range(whole=True).holds(self.mirostat) or self.mirostat not in (0, 2):
            raise SettingError(f"mirostat: saw {shown(self.mirostat)}, wanted 0 (off) or 2")
        if self.seed is not None and not Range(0, whole=True).holds(self.seed):
            raise SettingError(f"seed: saw {shown(self.seed)}, wanted {Range(0, whole=True)}, or None")
        self._check_breakers()
        self._check_logit_bias()

    def _check_breakers(self) -> None:
        name, breakers = "dry_sequence_breakers", self.dry_sequence_breakers
        if isinstance(breakers, str):
            raise SettingError(f"{name}: saw the text {shown(breakers)}, wanted a tuple of texts")
        if not isinstance(breakers, Iterable):
            raise SettingError(f"{name}: saw {shown(breakers)}, wanted a tuple of texts")
        for breaker in breakers:
            if not isinstance(breaker, str) or not breaker:
                raise SettingError(f"{name}: saw {shown(breaker)}, wanted text that isn't empty")

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise SettingError(
                f"logit_bias: saw {shown(self.logit_bias)}, wanted token ids and biases, as {{5: -1.0}}"
            )
        given = {plain_number(token): plain_number(bias) for token, bias in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", given)
        for token_id, bias in given.items():
            if not Range(0, whole=True).holds(token_id):
                wanted = Range(0, whole=True)
                raise SettingError(f"logit_bias: saw token id {shown(token_id)}, wanted {wanted}")
            if bias != -math.inf and not Range().holds(bias):
                raise SettingError(
                    f"logit_bias: saw {shown(bias)} for token {token_id}, wanted a finite number or -inf"
                )

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """Settings from a caller's keyword arguments.

        Raises:
            SettingError: a keyword that is no sampler setting, with the nearest ones that are.
        """
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise SettingError(f"{name}: no such sampler setting; {hint}")
        return cls(**given)
