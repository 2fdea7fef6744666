"""The kinds of blocks that layers are built of: specification, weights, sizes and state; no backend."""

from pkgutil import iter_modules

BLOCK_KINDS = tuple(sorted(found.name for found in iter_modules(__path__) if not found.ispkg))
"""The module of each kind here, and in `blocks` of every backend. What kinds share is in `common`."""
