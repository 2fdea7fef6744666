"""Title of an unnamed chat: its first message, without attached files."""

import re

TITLE_LENGTH = 60
ATTACHMENT = re.compile(r"\n\n([^\n]+):\n(`{3,})[^\n`]*\n")
"""Matches the start of an attached file's text: the file's name, then a fence."""


def written_part(message: str) -> str:
    """A message without the texts of files appended for `@path`."""
    for found in ATTACHMENT.finditer(message):
        before = message[: found.start()]
        if re.search(rf'@(?:"[^"\n]*|\S*){re.escape(found[1])}', before):
            return before
    return message


def title_of(message: str) -> str:
    """The beginning of a message on one line of at most `TITLE_LENGTH` characters."""
    line = " ".join(written_part(message).split())
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 3] + "..."
