"""Converts numpy scalars to Python numbers."""

from numbers import Real
from typing import Any


def plain_number(value: Any) -> Any:
    """The `int` or `float` value of a numpy scalar; other values unchanged. Doesn't import numpy."""
    if type(value).__module__ == "numpy" and issubclass(type(value), Real):
        return value.item()
    return value
