"""Memory is reused only when nothing refers to it."""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.schedule import MAX_KEPT, UnpackedRows


def at(array: npt.NDArray[np.float32]) -> int:
    return int(array.ctypes.data)


def test_referenced_memory_is_not_reused() -> None:
    room = UnpackedRows(64)
    held = [room.rows(5) for _ in range(MAX_KEPT + 2)]
    assert len({at(rows) for rows in held}) == len(held)
    assert all(rows.shape == (5, 64) and rows.dtype == np.float32 for rows in held)


def test_a_view_of_a_row_keeps_the_whole_row() -> None:
    rows = UnpackedRows(64)
    first = rows.rows(5)
    address, part = at(first), first[2, 3:10]
    del first
    other = rows.rows(4)
    assert at(other) != address
    part[:] = 1
    del part
    assert at(rows.rows(STEP_TOKENS)) == address


def test_single_rows_and_long_steps_are_newly_allocated() -> None:
    rows = UnpackedRows(64)
    for count in (1, STEP_TOKENS + 1):
        assert rows.rows(count).shape == (count, 64)
        assert rows.rows(count).base is None
