"""Integers on the command line: one value, comma-separated values, or a repeated option."""

from collections.abc import Sequence

from typer import BadParameter


def check_least(option: str, value: int | None, least: int = 1) -> None:
    """Raise `BadParameter` for a number below the minimum."""
    if value is not None and value < least:
        raise BadParameter(f"{option}: saw {value}, wanted a whole number of at least {least}")


def numbers(option: str, given: Sequence[str], least: int) -> list[int]:
    """["512,32", "8"] -> [512, 32, 8].

    Raises `BadParameter` for a value that isn't an integer of at least `least`.
    """
    found = []
    for text in ",".join(given).split(","):
        word = text.strip()
        if not (word.isascii() and word.isdigit() and int(word) >= least):
            raise BadParameter(f"{option}: saw {word!r}, wanted whole numbers of at least {least}, as 1,2")
        found.append(int(word))
    return found
