"""Rows of hidden states are copied from any array, and addresses are those of the arrays that exist."""

from typing import Any

import numpy as np
import pytest

from edgeinfer_kernels.caches.state_rows import MAX_KNOWN, RowAddresses, StateRows


@pytest.mark.parametrize("width", [1, 5, 64])
def test_rows_are_copied_to_where_they_belong(width: int) -> None:
    rows, given = StateRows(20, width), np.random.default_rng(1).normal(size=(7, width)).astype(np.float32)
    rows.array[:] = expected = np.full((20, width), np.nan, np.float32)
    for at, part in ((3, given), (0, given[2:4]), (12, given[::2]), (17, given[6:]), (19, given[:0])):
        rows.write(at, part)
        expected[at : at + len(part)] = part
    np.testing.assert_array_equal(rows.array, expected)


def test_states_of_several_layers_are_copied_side_by_side() -> None:
    rows, given = StateRows(9, 6), np.arange(12, dtype=np.float32).reshape(4, 3)
    rows.array[:] = 0
    rows.write(2, given, 0)
    rows.write(2, given + 100, 3)
    np.testing.assert_array_equal(rows.array[2:6], np.concatenate([given, given + 100], axis=1))
    assert not rows.array[6:].any()


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
