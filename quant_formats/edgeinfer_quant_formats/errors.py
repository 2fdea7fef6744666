"""The errors of this package, and quoting of names from files."""

LONGEST_QUOTE = 120


class FormatError(ValueError):
    """Invalid data; the message has the location, the value found and the expected value."""


class UnsupportedTypeError(FormatError):
    """A valid file with a tensor type without a codec."""


def printable(text: object) -> str:
    """Quote a name from a file: control characters and invalid UTF-8 are escaped, long names are cut."""
    shown = str(text) or "''"
    if len(shown) > LONGEST_QUOTE:
        shown = shown[:LONGEST_QUOTE] + "..."
    if shown.isprintable():
        return shown
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in shown)
