"""Compiled loads and stores of the interpreter, against what the memory holds."""

from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.interpreted.memory import Array, load, store

TYPES = ("bool", "int8", "float16", "uint16", "float32", "int32", "int64", "uint64")


def addresses_of(memory: Array, indices: Any) -> Array:
    return (memory.ctypes.data + memory.itemsize * np.asarray(indices)).astype(np.uint64)


def numbers(count: int, dtype: str) -> Array:
    return np.random.default_rng(2).integers(0, 100, count).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_are_loaded_where_the_mask_is_set(dtype: str) -> None:
    memory, indices = numbers(40, dtype), np.random.default_rng(3).integers(0, 40, (3, 5, 7))
    mask = indices % 3 != 0
    others = np.broadcast_to(numbers(7, dtype), indices.shape)
    found = load(addresses_of(memory, np.where(mask, indices, 1 << 40)), mask, others, np.dtype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.where(mask, memory[indices], others))
    every = load(
        addresses_of(memory, indices)[:, ::2], np.broadcast_to(True, (3, 3, 7)), others[:, ::2], found.dtype
    )
    np.testing.assert_array_equal(every, memory[indices[:, ::2]])


@pytest.mark.parametrize("dtype", TYPES)
def test_values_are_stored_where_the_mask_is_set_and_the_last_one_stays(dtype: str) -> None:
    memory, indices = numbers(40, dtype), np.random.default_rng(4).integers(0, 40, (6, 9))
    expected, values, mask = memory.copy(), numbers(54, dtype).reshape(6, 9).T[::-1].T, indices % 5 != 0
    for index, value, is_wanted in zip(indices.flat, values.flat, mask.flat, strict=True):
        if is_wanted:
            expected[index] = value
    store(addresses_of(memory, np.where(mask, indices, 1 << 40)), values, mask)
    np.testing.assert_array_equal(memory, expected)


def test_a_broadcast_value_is_stored_at_each_address() -> None:
    memory = np.zeros(8, np.int32)
    value, mask = np.broadcast_to(np.int32(7), (4,)), np.broadcast_to(True, (4,))
    store(addresses_of(memory, [1, 2, 5, 7]), value, mask)
    assert memory.tolist() == [0, 7, 7, 0, 0, 7, 0, 7]
