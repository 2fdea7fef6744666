"""The units of compilation: one for every row format, one for all that doesn't depend on formats.

Only the build process imports this module; it brings numba.
"""

from typing import Any

from numba import types

from edgeinfer_kernels.cpu.native import attention, feed_forward, file_rows, interleave, read_memory, team
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.row_formats import ROW_KERNELS
from edgeinfer_kernels.cpu.native.rows import ROW_ARGUMENTS

BLOCKS = "blocks"


def unit_exports(unit: str) -> dict[str, Any]:
    """Symbol -> (numba function, signature) of the unit `blocks` or `rows_<format>`."""
    if unit == BLOCKS:
        parts = (team, interleave, read_memory, attention, feed_forward, file_rows)
        return {name: export for part in parts for name, export in part.exports.items()}
    signature = types.void(*(types.int64,) * ROW_ARGUMENTS)
    return {unit: (inner(ROW_KERNELS[unit.removeprefix("rows_")]()), signature)}
