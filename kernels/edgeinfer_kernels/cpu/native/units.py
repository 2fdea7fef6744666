"""The units of compilation: one for every row format, others for what doesn't depend on formats.

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
    service,
    sparse_feed_forward,
    team,
)
from edgeinfer_kernels.cpu.native.decode_row import make_decode_row
from edgeinfer_kernels.cpu.native.exports import inner
from edgeinfer_kernels.cpu.native.neuron_columns import (
    COLUMN_FORMATS,
    NEURON_SUMS_ARGUMENTS,
    make_neuron_sums,
)
from edgeinfer_kernels.cpu.native.neuron_rows import CUT_FORMATS, NEURON_ROWS_ARGUMENTS, make_neuron_rows
from edgeinfer_kernels.cpu.native.row_formats import FLOAT_ROW_KERNELS, ROW_FORMATS
from edgeinfer_kernels.cpu.native.row_loops import make_rows
from edgeinfer_kernels.cpu.native.rows import ROW_ARGUMENTS
from edgeinfer_kernels.cpu.native.tile_rows import make_tile_rows

PARTS = {
    "blocks": (team, interleave, read_memory, attention, feed_forward, file_rows),
    "experts": (experts,),
    "service": (service,),
    "sparse": (sparse_feed_forward,),
}
DECODE_ARGUMENTS = 6


def unit_exports(unit: str, *, tiles: bool) -> dict[str, Any]:
    """Symbol -> (numba function, signature) of a unit: one of PARTS, `rows_<format>` or `neurons_<format>`.

    `tiles`: with the row kernels by tiles.
    """
    if unit in PARTS:
        return {name: export for part in PARTS[unit] for name, export in part.exports.items()}
    if unit.startswith("neurons_"):
        return neuron_exports(unit.removeprefix("neurons_"))
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


def neuron_exports(name: str) -> dict[str, Any]:
    """What a sparse feed-forward does with one format."""
    rows, sums = make_neuron_rows(CUT_FORMATS[name]), make_neuron_sums(COLUMN_FORMATS[name])
    return {
        f"neuron_rows_{name}": (inner(rows), types.void(*(types.int64,) * NEURON_ROWS_ARGUMENTS)),
        f"neuron_sums_{name}": (inner(sums), types.void(*(types.int64,) * NEURON_SUMS_ARGUMENTS)),
    }
