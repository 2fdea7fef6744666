"""Texts that options name by their file."""

from pathlib import Path

from typer import BadParameter


def text_of(path: Path, option: str = "--text") -> str:
    """All of a file that an option names. Raises BadParameter where it isn't UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadParameter(
            f"{option} {path}: byte {error.start} isn't UTF-8, wanted a text in UTF-8"
        ) from error
