"""Sampling parameters."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypedDict

from edgeinfer.errors import SettingError, shown
from edgeinfer.options.option_field import (
    Range,
    check_names,
    check_options,
    option,
    options_from,
    plain_number,
    whole,
)

SAMPLERS = "Samplers, in the order in which they are applied"
GENERATION = "Generation"
_option = partial(option, panel=SAMPLERS, commands="run chat", server=True)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, in the order in which the samplers are applied; the defaults are llama.cpp's.

    `repeat_last_n` and `dry_penalty_last_n` count tokens back from the end; 0 disables the penalty, -1 uses
    the whole history. `top_n_sigma` up to 0, `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 are off.
    `logit_bias` maps a token id to the value added to its logit; `-inf` bans the token. `seed` None uses a
    random one.

    Raises:
        SettingError: a value out of range; the message has the setting, its value and the allowed range.
    """

    seed: int | None = _option(
        None, "Random seed; the same seed samples the same tokens.", allowed=whole(0), panel=GENERATION,
        flags=("--seed", "-s"), default_note="random, also -1", common=True,
    )  # fmt: skip
    logit_bias: Mapping[int, float] = _option(
        None, "Add a bias to a token's logit; -inf bans the token. May be repeated.", default_factory=dict,
        metavar="ID=BIAS", persistent=False,
    )  # fmt: skip
    repeat_penalty: float = _option(
        1.0, "Divide the logits of repeated tokens.", allowed=Range(0, above=True), default_note="off"
    )
    repeat_last_n: int = _option(
        64, "Tokens of the history that the three penalties use; -1: all.", allowed=whole(-1)
    )
    presence_penalty: float = _option(
        0.0, "Subtract from the logit of every token in the history.", allowed=Range(), default_note="off"
    )
    frequency_penalty: float = _option(
        0.0, "Subtract from a token's logit for each occurrence.", allowed=Range(), default_note="off"
    )
    dry_multiplier: float = _option(
        0.0, "DRY: penalize tokens that extend a repeated sequence.", allowed=Range(0), default_note="off"
    )
    dry_base: float = _option(1.75, "DRY: growth of the penalty per repeated token.", allowed=Range(1))
    dry_allowed_length: int = _option(2, "DRY: length of repetitions without a penalty.", allowed=whole(1))
    dry_penalty_last_n: int = _option(
        -1, "DRY: tokens of the history that it searches; -1: all.", allowed=whole(-1)
    )
    dry_sequence_breakers: tuple[str, ...] = _option(
        ("\n", ":", '"', "*"), "DRY: a text that ends a repeated sequence. May be repeated.",
        flags=("--dry-sequence-breaker",), metavar="TEXT",
    )  # fmt: skip
    top_n_sigma: float = _option(
        -1.0, "Keep tokens at most n standard deviations below the best logit.", allowed=Range(),
        default_note="off",
    )  # fmt: skip
    top_k: int = _option(40, "Keep the k most probable tokens; 0: all.", allowed=whole(0))
    typical_p: float = _option(
        1.0, "Locally typical sampling: keep tokens up to this probability.", allowed=Range(0, 1),
        default_note="off",
    )  # fmt: skip
    top_p: float = _option(
        0.95, "Nucleus sampling: keep the most probable tokens up to this probability.", allowed=Range(0, 1)
    )
    min_p: float = _option(
        0.05, "Keep tokens with at least this probability, relative to the most probable one.",
        allowed=Range(0, 1),
    )  # fmt: skip
    xtc_probability: float = _option(
        0.0, "XTC: probability of removing the most probable tokens.", allowed=Range(0, 1),
        default_note="off",
    )  # fmt: skip
    xtc_threshold: float = _option(
        0.1, "XTC: minimum probability of a token that is removed.", allowed=Range(0, 1)
    )
    temperature: float = _option(
        0.8,
        "Divide the logits: higher is more varied; 0: greedy, always the most probable token.",
        allowed=Range(0),
        common=True,
    )
    mirostat: Literal[0, 2] = _option(
        0, "2: Mirostat 2.0 replaces top-k, typical, top-p, min-p and XTC.", metavar="0|2",
        default_note="off",
    )  # fmt: skip
    mirostat_tau: float = _option(5.0, "Mirostat: target surprise, in bits.", allowed=Range(0, above=True))
    mirostat_eta: float = _option(0.1, "Mirostat: learning rate.", allowed=Range(0))

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """The parameters of a caller's keywords. Raises `SettingError`."""
        check_names(given, cls)
        return options_from(cls, given)

    def __post_init__(self) -> None:
        check_options(self)
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
            if not whole(0).holds(token_id):
                raise SettingError(f"logit_bias: saw token id {shown(token_id)}, wanted {whole(0)}")
            if bias != -math.inf and not Range().holds(bias):
                raise SettingError(
                    f"logit_bias: saw {shown(bias)} for token {token_id}, wanted a finite number or -inf"
                )


class SamplingKeywords(TypedDict, total=False):
    """Keywords of a completion: the fields of `SamplingParams`."""

    seed: int | None
    logit_bias: Mapping[int, float]
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    top_k: int
    top_n_sigma: float
    typical_p: float
    top_p: float
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    temperature: float
    mirostat: Literal[0, 2]
    mirostat_tau: float
    mirostat_eta: float
