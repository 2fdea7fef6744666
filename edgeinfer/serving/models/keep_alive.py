"""How long an idle model stays loaded: numbers of seconds, and texts as 5m."""

import re
from typing import Any

from edgeinfer.errors import SettingError, shown

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h|d))+")
_PART = re.compile(r"([\d.]+)([a-zµ]+)")
MAX_TEXT = 40


def keep_alive_of(value: Any) -> float | None:
    """Seconds: of a number of them, or of a text as 5m; negative: forever. None: not given.

    Raises:
        SettingError: it is no duration.
    """
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9:
        return float(value)
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        if re.fullmatch(r"-?\d{1,9}", value):
            return float(value)
        if _DURATION.fullmatch(value):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
            return -seconds if value.startswith("-") else seconds
    raise SettingError(f"keep_alive: saw {shown(value)}, wanted seconds or a duration as 5m; -1: forever")
