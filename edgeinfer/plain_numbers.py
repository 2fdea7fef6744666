"""Numbers as callers have them: out of numpy, a count or a temperature is the number that it stands for."""

from typing import Any

import numpy as np


def plain_number(value: Any) -> Any:
    """The `int` or `float` that a numpy scalar stands for; anything else as it is."""
    return value.item() if isinstance(value, np.integer | np.floating) else value
