"""Element types of a KV cache, the same for keys and values or one for each."""

from typing import Literal, get_args

ElementType = Literal["f32", "f16", "fp8", "q8_0", "q4_0"]
ELEMENT_TYPES: tuple[ElementType, ...] = get_args(ElementType)
CacheType = str
"""An element type, or those of keys and of values as `q8_0/q4_0`; with `+f16` after it, the last positions
are in f16 too (`recent_pages.py`).
"""
RECENT = "+f16"
SCALED_TYPES: tuple[ElementType, ...] = ("q8_0", "q4_0")
"""Types whose elements share scales."""
CPU_TYPES: tuple[ElementType, ...] = ("f32",)
"""Types without GPU kernels."""


def element_types(kind: CacheType) -> tuple[ElementType, ElementType]:
    """The types of keys and of values.

    Raises:
        ValueError: no cache type.
    """
    keys, separator, values = kind.removesuffix(RECENT).partition("/")
    found = keys, values if separator else keys
    if not set(found) <= set(ELEMENT_TYPES):
        raise ValueError(f"no cache type: {kind!r}")
    return found  # type: ignore[return-value]


def has_recent(kind: CacheType) -> bool:
    """Whether the last positions are in f16 too."""
    return kind.endswith(RECENT)


def is_for_cpu(kind: CacheType) -> bool:
    """Whether keys or values have no GPU kernels."""
    return any(each in CPU_TYPES for each in element_types(kind))
