"""The kinds of blocks that layers are built of: specification, weights, sizes and state; no backend."""

from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

COMMON = "common"


def _kinds(folder: str, prefix: str = "") -> Iterator[str]:
    for found in iter_modules([folder]):
        if not found.ispkg:
            yield prefix + found.name
        elif found.name != COMMON:
            yield from _kinds(str(Path(folder, found.name)), f"{found.name}.")


BLOCK_KINDS = tuple(sorted(_kinds(__path__[0])))
"""The module of each kind here, and in `blocks` of every backend; those of one architecture are in a package,
`gemma3n.laurel`. What kinds share is in `common`.
"""
