"""Devices and budgets of their memory as a user writes them: "cuda:0,cuda:1", "8GiB,4GiB"."""

import re
from typing import Any

from edgeinfer.errors import SettingError, shown
from edgeinfer.options.option_field import plain_number

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def is_device(name: str) -> bool:
    """Whether `name` is a device name for `load`: "auto", "cpu", "cuda", "cuda:N", "cuda:N,cuda:M"."""
    names = device_names(name)
    if len(names) == 1:
        return name in ("auto", "cpu") or re.fullmatch(r"cuda(:\d{1,2})?", name) is not None
    return len(set(names)) == len(names) and all(re.fullmatch(r"cuda:\d{1,2}", each) for each in names)


def device_names(name: str) -> tuple[str, ...]:
    """The devices of a list of names."""
    return tuple(part.strip() for part in name.split(","))


def parse_bytes(name: str, size: Any) -> int | None:
    """Bytes of a setting: an integer, or "8GiB", "512 MB", "2G"; None stays None.

    Raises:
        SettingError: another format.
    """
    size = plain_number(size)
    if size is None:
        return None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower(), re.ASCII)
        if match and match[2] != "i":
            return int(float(match[1]) * (UNITS | BINARY_UNITS)[match[2]])
    elif isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    raise SettingError(f'{name}: saw {shown(size)}, wanted bytes or a size like "8GiB"')


def parse_budgets(name: str, sizes: Any) -> int | tuple[int, ...] | None:
    """Bytes as `parse_bytes`, or a tuple of them: of "8GiB,4GiB", or of a list. Raises `SettingError`."""
    several = sizes.split(",") if isinstance(sizes, str) and "," in sizes else sizes
    if not isinstance(several, list | tuple):
        return parse_bytes(name, sizes)
    budgets = [parse_bytes(name, size) for size in several]
    if not budgets or None in budgets:
        raise SettingError(f'{name}: saw {shown(sizes)}, wanted a size for each GPU, as "8GiB,4GiB"')
    return tuple(budget for budget in budgets if budget is not None)
