"""The units of compilation: one for every row format, one for all that doesn't depend on formats.

Only the build process imports this module; it brings numba.
"""

from typing import Any

from numba import types

from edgeinfer_kernels.cpu import attention, feed_forward, interleave, team
from edgeinfer_kernels.cpu.native import inner
from edgeinfer_kernels.cpu.row_formats import ROW_KERNELS
from edgeinfer_kernels.cpu.rows import ROW_ARGUMENTS

BLOCKS = "blocks"


def unit_exports(unit: str) -> dict[str, Any]:
    """Symbol -> (numba function, signature) of the unit `blocks` or `rows_<format>`."""
    if unit == BLOCKS:
        parts = (team.exports, interleave.exports, attention.exports, feed_forward.exports)
        return {name: export for part in parts for name, export in part.items()}
    signature = types.void(*(types.int64,) * ROW_ARGUMENTS)
    return {unit: (inner(ROW_KERNELS[unit.removeprefix("rows_")]()), signature)}
