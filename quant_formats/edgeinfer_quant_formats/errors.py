"""The one error of this part, and how names out of a file are quoted in it."""

LONGEST_QUOTE = 120


class FormatError(ValueError):
    """Bytes that don't mean what they should; the text names the place, what was seen and what was wanted."""


class UnsupportedTypeError(FormatError):
    """A sound file with a tensor type that has no codec here."""


def printable(text: object) -> str:
    """Quote a name that came from a file: control characters and broken UTF-8 escaped, long ones cut."""
    shown = str(text) or "''"
    if len(shown) > LONGEST_QUOTE:
        shown = shown[:LONGEST_QUOTE] + "..."
    if shown.isprintable():
        return shown
    return "".join(mark if mark.isprintable() else ascii(mark)[1:-1] for mark in shown)
