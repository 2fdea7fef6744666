"""Reads TOML files written by users, with every error in one line."""

import re
import tomllib
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
MAX_KEY_PARTS = 32
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
LONG_KEY = re.compile(rf"^[\s\[{{]*{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MAX_KEY_PARTS}}}", re.MULTILINE)
"""Matches keys with too many parts: tomllib's time is quadratic in them."""


class TomlError(ValueError):
    """Invalid TOML; the text gives the file and the reason."""


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        TomlError: not a regular file of at most `MAX_BYTES`, or invalid TOML.
        OSError: it can't be read.
    """
    if not path.is_file():
        path.stat()  # raises if the file doesn't exist
        raise TomlError(f"{path}: no regular file, wanted one in TOML")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise TomlError(f"{path}: more than {MAX_BYTES >> 10} KiB, wanted a short file in TOML")
    try:
        text = content.decode("utf-8")
        if LONG_KEY.search(text):
            raise TomlError(f"{path}: no TOML: a key of more than {MAX_KEY_PARTS} parts")
        return tomllib.loads(text)
    except TomlError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:  # tomllib raises other errors besides its own
        raise TomlError(f"{path}: no TOML: {' '.join(str(error).split())[:200]}") from error
    except RecursionError as error:
        raise TomlError(f"{path}: no TOML: tables or arrays nested too deep") from error
