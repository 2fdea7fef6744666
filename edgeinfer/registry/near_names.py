"""The names that a mistyped one may stand for."""

import difflib
from collections.abc import Iterable

LIKENESS = 0.6
"""Of difflib's ratio, from which names look alike."""
MAX_LENGTH = 100
"""Characters of a mistyped name that are compared: the time is their number squared."""
MARGIN = 0.1
"""How far the ratio of a further name may be below the best."""


def nearest(wrong: str, names: Iterable[str], most: int = 3) -> list[str]:
    """At most so many names: those that begin with what was typed, letters and digits alone compared;
    without any, those that are spelled alike, the best first.
    """
    known = list(dict.fromkeys(names))
    wrong = wrong[:MAX_LENGTH]
    plain = _plain(wrong)
    beginning = [name for name in known if plain and _plain(name).startswith(plain)]
    if beginning:
        return sorted(beginning, key=len)[:most]
    ratios = {name: difflib.SequenceMatcher(None, plain, _plain(name)).ratio() for name in known}
    best = max(ratios.values(), default=0.0)
    alike = [name for name in known if ratios[name] >= max(LIKENESS, best - MARGIN)]
    return sorted(alike, key=lambda name: -ratios[name])[:most]


def _plain(name: str) -> str:
    return "".join(mark for mark in name.casefold() if mark.isalnum())
