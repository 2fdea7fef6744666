"""Converts numpy scalars to Python numbers."""

from typing import Any

import numpy as np


def plain_number(value: Any) -> Any:
    """The `int` or `float` value of a numpy scalar; other values unchanged."""
    return value.item() if isinstance(value, np.integer | np.floating) else value
