"""Slices of rows are those of the array, and addresses are those of the arrays that exist."""

from typing import Any

import numpy as np

from edgeinfer_kernels.caches.state_rows import MAX_KNOWN, RowAddresses, StateRows


def test_a_slice_has_the_rows_of_the_array() -> None:
    array = np.arange(20, dtype=np.float32).reshape(10, 2)
    rows = StateRows(array, 2, 7)
    assert len(rows) == 7
    for first, last in ((0, 7), (1, 4), (3, 3), (5, 9)):
        part = rows[first:last]
        assert len(part) == len(array[2:9][first:last])
        np.testing.assert_array_equal(part.view, array[2:9][first:last])
        np.testing.assert_array_equal(np.concatenate([part, part]), np.concatenate([part.view, part.view]))
    rows[1:3][1:].view[:] = -1
    assert (array[4] == -1).all()
    assert array.min(axis=1).tolist().count(-1) == 1


def test_only_float32_rows_one_after_the_other_have_an_address() -> None:
    addresses, rows = RowAddresses(8), np.zeros((6, 8), np.float32)
    assert addresses.of(rows) == rows.ctypes.data
    assert addresses.of(rows[2:4]) == rows[2:].ctypes.data
    fixed = rows.copy()
    fixed.flags.writeable = False
    doubles: Any = rows.astype(np.float64)
    for other in (rows[::2], rows[:, :4], doubles, rows.T.copy(), rows[:0], fixed):
        assert addresses.of(other) is None


def test_an_array_in_the_memory_of_another_one_has_that_address() -> None:
    addresses = RowAddresses(4)
    for count in range(3 * MAX_KNOWN):
        rows = np.zeros((1 + count, 4), np.float32)
        assert addresses.of(rows) == addresses.of(rows) == rows.ctypes.data
