"""Quantizations in file names."""

import re

_LABEL = re.compile(
    r"(?:^|[-._/])(?P<label>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32))"
    r"(?=$|[-./]|-\d{5}-of-)",
    re.IGNORECASE | re.ASCII,
)
FLOATS = ("F32", "BF16", "F16")


def quant_of(file_name: str) -> str:
    """The quantization in a file's name or its folder's, in capitals; "" if there is none.

    "Qwen3-8B-Q4_K_M.gguf" -> "Q4_K_M"; "UD-Q4_K_XL/big-00001-of-00002.gguf" -> "UD-Q4_K_XL".
    """
    found = _LABEL.findall(file_name.removesuffix(".gguf"))
    return str(found[-1]).upper() if found else ""


def bits_of(label: str) -> float:
    """Approximate bits per weight from the name: "Q4_K_M" -> 4; 16 and 32 for the float types."""
    plain = label.removeprefix("UD-")
    if plain in FLOATS:
        return 32 if plain == "F32" else 16
    digits = re.search(r"\d", plain)
    return float(digits[0]) if digits else 16
