"""The quantization mixes, such as Q4_K_M, as a table.

A mix has a base format and rules for tensors with another format. The first rule that applies decides.
Source: the type choices of llama.cpp's quantizer; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from edgeinfer_quant_formats.errors import FormatError, printable
from edgeinfer_quant_formats.quantizer.mix_rules import (
    Condition,
    Rule,
    eight_experts,
    first,
    first_share,
    first_share_of_tensors,
    four_experts,
    four_heads_per_key,
    has_importance,
    is_falcon,
    middle,
    more_bits,
    unless,
)
from edgeinfer_quant_formats.quantizer.tensor_roles import Role


@dataclass(frozen=True, slots=True)
class Mix:
    """A named mix; `file_type` is its number in `general.file_type`."""

    name: str
    file_type: int
    base: str
    bits: float
    """Bits per weight of the base format; a file has slightly more."""
    rules: tuple[Rule, ...] = ()
    output: str = "Q6_K"
    """Format of the output matrix; Q8_0 if the base is."""
    is_lowest: bool = False
    """Of 1 or 2 bits: the rules that all other mixes share don't apply."""
    experts_only: bool = False
    """The base format is for expert matrices; all others are Q8_0."""


def _value(format: str, *conditions: Condition) -> Rule:
    return Rule(Role.ATTENTION_VALUE, format, conditions)


def _down(format: str, *conditions: Condition) -> Rule:
    return Rule(Role.FFN_DOWN, format, conditions)


def _attention_output(format: str, *conditions: Condition) -> Rule:
    return Rule(Role.ATTENTION_OUTPUT, format, conditions)


def _key(format: str, *conditions: Condition) -> Rule:
    return Rule(Role.ATTENTION_KEY, format, conditions)


def _lowest(name: str, file_type: int, base: str, bits: float, better: str, output: Rule | None) -> Mix:
    """A mix of 1 or 2 bits, with the format `better` for values, the first matrices and the embedding."""
    rules = (
        _value("Q4_K", four_heads_per_key),
        _value("Q4_K", four_experts),
        _value(better),
        _key("Q4_K", eight_experts),
        _down(better, first_share_of_tensors(8)),
        _attention_output("Q5_K", eight_experts),
        Rule(Role.TOKEN_EMBEDDING, better),
    )
    return Mix(name, file_type, base, bits, rules + ((output,) if output else ()), "Q5_K", is_lowest=True)


_ANY_MIX = (_value("Q8_0", eight_experts), _key("Q8_0", eight_experts))
_EIGHT_EXPERTS_OUTPUT = _attention_output("Q5_K", eight_experts, unless(is_falcon))
_TERNARY = (Rule(Role.TOKEN_EMBEDDING, "Q4_K"),)
_UNEVEN = (
    _value("Q5_K", four_heads_per_key),
    _down("Q5_K", first_share(8), unless(has_importance)),
    _EIGHT_EXPERTS_OUTPUT,
)

_MIXES = (
    Mix("F32", 0, "F32", 32),
    Mix("F16", 1, "F16", 16),
    Mix("BF16", 32, "BF16", 16),
    Mix("Q8_0", 7, "Q8_0", 8.5),
    Mix("Q6_K", 18, "Q6_K", 6.5625),
    Mix("Q5_K_M", 17, "Q5_K", 5.5, (_value("Q6_K", more_bits), _down("Q6_K", more_bits))),
    Mix("Q5_K_S", 16, "Q5_K", 5.5),
    Mix("Q5_1", 9, "Q5_1", 6),
    Mix("Q5_0", 8, "Q5_0", 5.5, (_down("Q5_1", has_importance, first_share(8)),)),
    Mix(
        "Q4_K_M", 15, "Q4_K", 4.5,
        (
            _value("Q6_K", more_bits),
            _down("Q6_K", is_falcon, first_share(16)),
            _down("Q5_K", is_falcon, more_bits),
            _down("Q6_K", more_bits, unless(is_falcon)),
            _EIGHT_EXPERTS_OUTPUT,
        ),
    ),
    Mix(
        "Q4_K_S", 14, "Q4_K", 4.5,
        (_value("Q5_K", first(4)), _down("Q5_K", first_share(8), unless(is_falcon)), _EIGHT_EXPERTS_OUTPUT),
    ),
    Mix("IQ4_NL", 25, "IQ4_NL", 4.5, _UNEVEN),
    Mix("IQ4_XS", 30, "IQ4_XS", 4.25, _UNEVEN),
    Mix("Q4_1", 3, "Q4_1", 5),
    Mix("Q4_0", 2, "Q4_0", 4.5, (_down("Q4_1", has_importance, first_share(8)),)),
    Mix("MXFP4_MOE", 38, "MXFP4", 4.25, experts_only=True),
    Mix(
        "Q3_K_L", 13, "Q3_K", 3.4375,
        (
            _value("Q5_K"),
            _down("Q4_K", is_falcon),
            _down("Q5_K"),
            _attention_output("Q4_K", is_falcon),
            _attention_output("Q5_K", unless(eight_experts)),
        ),
    ),
    Mix(
        "Q3_K_M", 12, "Q3_K", 3.4375,
        (
            _value("Q5_K", first(2)),
            _value("Q4_K"),
            _down("Q5_K", first_share(16)),
            _down("Q4_K", unless(is_falcon)),
            _down("Q4_K", more_bits),
            _EIGHT_EXPERTS_OUTPUT,
            _attention_output("Q4_K", unless(is_falcon)),
        ),
    ),
    Mix("Q3_K_S", 11, "Q3_K", 3.4375, (_EIGHT_EXPERTS_OUTPUT,)),
    Mix(
        "Q2_K", 10, "Q2_K", 2.625,
        (
            _value("Q4_K", four_heads_per_key),
            _value("Q3_K"),
            _down("Q3_K"),
            _EIGHT_EXPERTS_OUTPUT,
            _attention_output("Q3_K", unless(is_falcon)),
        ),
    ),
    Mix(
        "Q2_K_S", 21, "Q2_K", 2.625,
        (_value("Q4_K", four_heads_per_key), _down("Q4_K", first_share(8))),
    ),
    Mix(
        "IQ3_M", 27, "IQ3_S", 3.4375,
        (
            _value("Q4_K"),
            _down("Q4_K", first_share(8)),
            _down("Q4_K", eight_experts, more_bits),
            _EIGHT_EXPERTS_OUTPUT,
            _attention_output("Q4_K", unless(is_falcon)),
        ),
    ),
    Mix("IQ3_S", 26, "IQ3_S", 3.4375, (_value("Q4_K", four_heads_per_key), _EIGHT_EXPERTS_OUTPUT)),
    Mix(
        "IQ3_XS", 22, "IQ3_S", 3.4375,
        (
            _value("Q4_K", four_heads_per_key),
            _key("IQ3_XXS"),
            Rule(Role.ATTENTION_QUERY, "IQ3_XXS"),
            Rule(Role.FFN_GATE, "IQ3_XXS", (middle,)),
            Rule(Role.FFN_UP, "IQ3_XXS", (middle,)),
            _EIGHT_EXPERTS_OUTPUT,
        ),
    ),
    Mix(
        "IQ3_XXS", 23, "IQ3_XXS", 3.0625,
        (
            _value("Q4_K", four_heads_per_key),
            _value("IQ3_S", unless(has_importance)),
            _key("IQ2_S"),
            Rule(Role.ATTENTION_QUERY, "IQ2_S"),
            _down("Q4_K", unless(has_importance), first_share(8)),
            _down("Q3_K", unless(has_importance)),
            _EIGHT_EXPERTS_OUTPUT,
            _attention_output("IQ3_S", unless(is_falcon)),
            Rule(Role.TOKEN_EMBEDDING, "IQ3_S"),
        ),
        output="Q5_K",
    ),
    _lowest("IQ2_M", 29, "IQ2_S", 2.5625, "IQ3_S", _attention_output("IQ3_S")),
    _lowest("IQ2_S", 28, "IQ2_XS", 2.3125, "IQ3_S", _attention_output("IQ3_S")),
    _lowest("IQ2_XS", 20, "IQ2_XS", 2.3125, "Q2_K", None),
    _lowest("IQ2_XXS", 19, "IQ2_XXS", 2.0625, "Q2_K", None),
    _lowest("IQ1_M", 31, "IQ1_M", 1.75, "Q2_K", _attention_output("IQ2_XXS")),
    _lowest("IQ1_S", 24, "IQ1_S", 1.5625, "Q2_K", _attention_output("IQ2_XXS")),
    Mix("Q1_0", 40, "Q1_0", 1.125),
    Mix("TQ2_0", 37, "TQ2_0", 2.0625, _TERNARY),
    Mix("TQ1_0", 36, "TQ1_0", 1.6875, _TERNARY),
)  # fmt: skip

MIXES: Mapping[str, Mix] = MappingProxyType({mix.name: mix for mix in _MIXES})
ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
)


def find_mix(name: str) -> Mix:
    """The mix with this name, case-insensitive; "Q4_K" means Q4_K_M, and so on.

    Raises:
        FormatError: an unknown name.
    """
    requested = name.upper()
    mix = MIXES.get(ALIASES.get(requested, requested))
    if mix is None:
        raise FormatError(f"type {printable(name)} is unknown; wanted one of {', '.join(MIXES)}")
    return mix


def rules_of(mix: Mix) -> tuple[Rule, ...]:
    """All rules of a mix; the rules shared by all mixes but the lowest come first."""
    return mix.rules if mix.is_lowest else _ANY_MIX + mix.rules
