"""Reads values from the metadata of an architecture; errors name the key."""

import math
from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer_quant_formats.errors import printable


class MetadataReader:
    """The metadata of a file; keys lack the prefix of its architecture, `name`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.name = printable(metadata.get("general.architecture", "(none)"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.name}.{key}", default)

    def refused(self, key: str, value: Any, expected: str) -> UnsupportedModelError:
        """The error for a key's value; long or unprintable values are shortened."""
        shown = "missing" if value is None else printable(" ".join(repr(value).split()))
        return UnsupportedModelError(f"{self.name}.{key}: {shown}, wanted {expected}")

    def number(self, key: str, default: float | None = None, above: float = -math.inf) -> float:
        """A finite number greater than `above`."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= above:
            bound = f" above {above:g}" if above > -math.inf else ""
            raise self.refused(key, value, f"a finite number{bound}")
        return float(value)

    def count(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 1 << 31) -> int:
        """An integer from `minimum` to `maximum`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refused(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def flag(self, key: str) -> bool:
        """Whether a value is true; it may be missing."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def factor(self, key: str, default: float = 0.0) -> float:
        """A positive number; 0: none."""
        value = self.get(key, default)
        is_none = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return 0.0 if is_none else self.number(key, default, above=0)
