"""Parses sizes in bytes."""

import re

from edgeinfer.errors import SettingError
from edgeinfer.shown import shown

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(name: str, size: int | str | None) -> int | None:
    """Bytes of a setting: an integer, or "8GiB", "512 MB", "2G"; None stays None.

    Raises:
        SettingError: another format.
    """
    if size is None:
        return None
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower(), re.ASCII)
        if found and found[2] != "i":
            return int(float(found[1]) * (UNITS | BINARY_UNITS)[found[2]])
    elif isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise SettingError(f'{name}: saw {shown(size)}, wanted bytes or a size like "8GiB"')
