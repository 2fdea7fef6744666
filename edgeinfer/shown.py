"""Values as error messages quote them, with limited length."""

import reprlib

LONGEST = 60

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = LONGEST
_SHORT.maxlevel = 2
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4


def shown(value: object, longest: int = LONGEST) -> str:
    """`repr` of a value, at most `longest` characters; the middle of a long text is omitted."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # from the value's __repr__, or an integer with more digits than Python prints
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def shortened(text: str, longest: int = LONGEST) -> str:
    """A name without line breaks and unprintable characters, at most `longest` characters."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text[: longest + 1])
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
