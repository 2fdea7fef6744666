"""Suggestions for a mistyped name."""

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.6
"""Minimum difflib ratio of a suggestion."""
MAX_LENGTH = 100
"""Maximum characters of a mistyped name that are compared: the time is quadratic in them."""
MARGIN = 0.1
"""Maximum difference between the ratio of a further suggestion and the best one."""


def nearest(typed: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """At most `limit` names: those that start with the typed text, comparing only letters and digits; if
    there are none, names with similar spelling, best first.
    """
    known = list(dict.fromkeys(names))
    typed = typed[:MAX_LENGTH]
    plain = _plain(typed)
    beginning = [name for name in known if plain and _plain(name).startswith(plain)]
    if beginning:
        return sorted(beginning, key=len)[:limit]
    ratios = {name: difflib.SequenceMatcher(None, plain, _plain(name)).ratio() for name in known}
    best = max(ratios.values(), default=0.0)
    alike = [name for name in known if ratios[name] >= max(MIN_SIMILARITY, best - MARGIN)]
    return sorted(alike, key=lambda name: -ratios[name])[:limit]


def _plain(name: str) -> str:
    return "".join(mark for mark in name.casefold() if mark.isalnum())
