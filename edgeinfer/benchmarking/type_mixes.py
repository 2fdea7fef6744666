"""Which format each matrix takes under the types that model files go by."""

from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.benchmarking.shapes import Shape
from edgeinfer.errors import SettingError
from edgeinfer_quant_formats import block_format

Where = Callable[[int, int], bool]
"""(layer, layers) -> whether a rule holds there."""


def _everywhere(layer: int, layers: int) -> bool:
    return True


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third layer between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _first_eighth(layer: int, layers: int) -> bool:
    return layer < layers // 8


def _first_two(layer: int, layers: int) -> bool:
    return layer < 2


def _first_sixteenth(layer: int, layers: int) -> bool:
    return layer < layers // 16


@dataclass(frozen=True)
class TypeMix:
    """A base format, that of the head, and rules (part of the name, format, where); the first that holds
    decides.
    """

    base: str
    head: str = "Q6_K"
    rules: tuple[tuple[str, str, Where], ...] = ()


_M_RULES = (("attn_v", "Q6_K", _more_bits), ("ffn_down", "Q6_K", _more_bits))
_UNEVEN_RULES = (("attn_v", "Q5_K", _everywhere), ("ffn_down", "Q5_K", _first_eighth))
MIXES = {
    "F32": TypeMix("F32", "F32"),
    "F16": TypeMix("F16", "F16"),
    "BF16": TypeMix("BF16", "BF16"),
    "Q8_0": TypeMix("Q8_0", "Q8_0"),
    "Q6_K": TypeMix("Q6_K"),
    "Q5_K_M": TypeMix("Q5_K", rules=_M_RULES),
    "Q5_0": TypeMix("Q5_0"),
    "Q5_1": TypeMix("Q5_1"),
    "Q4_K_M": TypeMix("Q4_K", rules=_M_RULES),
    "Q4_0": TypeMix("Q4_0"),
    "Q4_1": TypeMix("Q4_1"),
    "IQ4_NL": TypeMix("IQ4_NL", rules=_UNEVEN_RULES),
    "IQ4_XS": TypeMix("IQ4_XS", rules=_UNEVEN_RULES),
    "MXFP4": TypeMix("MXFP4", "Q8_0"),
    "Q3_K_M": TypeMix(
        "Q3_K",
        rules=(
            ("attn_v", "Q5_K", _first_two),
            ("attn_v", "Q4_K", _everywhere),
            ("ffn_down", "Q5_K", _first_sixteenth),
            ("ffn_down", "Q4_K", _everywhere),
            ("attn_output", "Q4_K", _everywhere),
        ),
    ),
    "Q2_K": TypeMix(
        "Q2_K",
        rules=(
            ("attn_v", "Q4_K", _everywhere),
            ("ffn_down", "Q3_K", _everywhere),
            ("attn_output", "Q3_K", _everywhere),
        ),
    ),
}
"""Source: the type choices of llama.cpp's quantizer; a dense file of MXFP4 doesn't exist there."""

STAND_IN = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
"""What stands in where a row doesn't fill whole blocks of 256."""


def find_mix(name: str) -> TypeMix:
    """The mix of that name. Raises `SettingError` if there is none."""
    found = MIXES.get(name.upper())
    if found is None:
        raise SettingError(f"type: saw {name!r}, wanted one of {', '.join(MIXES)}")
    return found


def matrix_formats(shape: Shape, mix: TypeMix) -> dict[str, str]:
    """Name -> format of every matrix of a shape."""
    head = "token_embd.weight" if shape.tied else "output.weight"
    formats = {}
    for name, (_, columns) in shape.matrices().items():
        wanted = mix.head if name == head else _by_rules(name, shape.layers, mix)
        fits = columns % block_format(wanted).block_elements == 0
        formats[name] = wanted if fits else STAND_IN.get(wanted, "F16")
    return formats


def _by_rules(name: str, layers: int, mix: TypeMix) -> str:
    place, _, rest = name.removeprefix("blk.").partition(".")
    if not rest or not place.isdigit():
        return mix.base
    found = (form for part, form, where in mix.rules if rest.startswith(part) and where(int(place), layers))
    return next(found, mix.base)
