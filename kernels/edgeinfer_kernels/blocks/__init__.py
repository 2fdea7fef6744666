"""The kinds of blocks that layers are built of: specification, weights, sizes and state; no backend."""

from pkgutil import iter_modules

SHARED_MODULES = ("block", "rope")
"""Modules here that are not block kinds."""
BLOCK_KINDS = tuple(
    sorted(found.name for found in iter_modules(__path__) if found.name not in SHARED_MODULES)
)
"""The module of each kind here, and in `blocks` of every backend."""
