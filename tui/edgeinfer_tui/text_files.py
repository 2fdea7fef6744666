"""Reads files named by options, and standard input, up to a size limit."""

from pathlib import Path
from typing import BinaryIO

from typer import BadParameter

from edgeinfer_tui.output.columns import shown_bytes

MAX_TEXT_BYTES = 64 << 20
"""Maximum size of a prompt, a schema or a text to evaluate: a device or a pipe may be endless."""


def text_of(path: Path, option: str = "--text") -> str:
    """The text of a file named by an option. Raises BadParameter if it is too long or isn't UTF-8."""
    with path.open("rb") as stream:
        return decoded(read_bounded(stream, f"{option} {path}"), f"{option} {path}")


def read_bounded(stream: BinaryIO, name: str) -> bytes:
    """The rest of a stream. Raises BadParameter if that is more than `MAX_TEXT_BYTES`."""
    data = stream.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise BadParameter(
            f"{name}: saw more than {shown_bytes(MAX_TEXT_BYTES)}, wanted a text of that size at most"
        )
    return data


def decoded(data: bytes, name: str) -> str:
    """Bytes as text. Raises BadParameter if they aren't UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadParameter(f"{name}: byte {error.start} isn't UTF-8, wanted a text in UTF-8") from error
