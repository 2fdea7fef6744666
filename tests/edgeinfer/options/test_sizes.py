"""Sizes with units."""

from typing import Any

import pytest

from edgeinfer.errors import SettingError
from edgeinfer.options.device_budgets import parse_bytes


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (None, None),
        (0, 0),
        (123, 123),
        ("123", 123),
        ("123B", 123),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("512 MB", 512_000_000),
        ("2G", 2_000_000_000),
        ("2Gi", 2 << 30),
        ("1.5KiB", 1536),
        ("0.5t", 500_000_000_000),
    ],
)
def test_a_size_is_parsed(size: int | str | None, nbytes: int | None) -> None:
    assert parse_bytes("ram", size) == nbytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "8 giraffes", "-1", -1, "8iB", "1e9", "8 GiB more", True, 1.5, [8], "٣G", "8,5G"]
)
def test_an_invalid_size_is_quoted(size: Any) -> None:
    with pytest.raises(SettingError) as caught:
        parse_bytes("vram", size)
    assert str(caught.value) == f'vram: saw {size!r}, wanted bytes or a size like "8GiB"'
