"""The units of compilation: one for every row format, one for all that doesn't depend on formats.

Only the build process imports this module; it brings numba.
"""

from typing import Any

from numba import config, types

from edgeinfer_kernels.cpu.native import (
    attention,
    experts,
    feed_forward,
    file_rows,
    interleave,
    read_memory,
    team,
)
from edgeinfer_kernels.cpu.native.decode_row import make_decode_row
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.row_formats import FLOAT_ROW_KERNELS, ROW_FORMATS
from edgeinfer_kernels.cpu.native.row_loops import make_rows
from edgeinfer_kernels.cpu.native.rows import ROW_ARGUMENTS
from edgeinfer_kernels.cpu.native.tile_rows import make_tile_rows

BLOCKS = "blocks"
DECODE_ARGUMENTS = 6


def unit_exports(unit: str, *, tiles: bool) -> dict[str, Any]:
    """Symbol -> (numba function, signature) of the unit `blocks` or `rows_<format>`.

    `tiles`: with the row kernels by tiles.
    """
    if unit == BLOCKS:
        parts = (team, interleave, read_memory, attention, feed_forward, experts, file_rows)
        return {name: export for part in parts for name, export in part.exports.items()}
    signature = types.void(*(types.int64,) * ROW_ARGUMENTS)
    name = unit.removeprefix("rows_")
    if name in FLOAT_ROW_KERNELS:
        return {unit: (inner(FLOAT_ROW_KERNELS[name]()), signature)}
    form, wide = ROW_FORMATS[name], "+avx512f" in (config.CPU_FEATURES or "")
    exports = {
        unit: (inner(make_rows(form, wide=wide)), signature),
        f"decode_{name}": (inner(make_decode_row(form)), types.void(*(types.int64,) * DECODE_ARGUMENTS)),
    }
    if tiles:
        exports[f"tile_{unit}"] = (inner(make_tile_rows(form)), signature)
    return exports
