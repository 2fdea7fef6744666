"""Matrices with factors: their parts have those of their experts."""

import numpy as np

from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import encode

VALUES = np.random.default_rng(11).standard_normal((4, 2, 64)).astype(np.float32)
SCALES = np.array([0.5, 1, 2, 4], np.float32)
STORED = Matrix("a.weight", "F32", 2, 64, encode(VALUES.reshape(-1), "F32").reshape(8, -1), 4, scales=SCALES)
EXPECTED = VALUES * SCALES[:, None, None]


def test_experts_keep_their_factors() -> None:
    np.testing.assert_array_equal(STORED.decoded().reshape(4, 2, 64), EXPECTED)
    np.testing.assert_array_equal(STORED.expert(2).decoded(), EXPECTED[2])
    for numbers in ([1, 2], [3, 0]):
        some = STORED.take_experts(numbers)
        np.testing.assert_array_equal(some.decoded().reshape(2, 2, 64), EXPECTED[numbers])
        np.testing.assert_array_equal(some.take_experts([1]).decoded(), EXPECTED[numbers[1]])


def test_parts_keep_the_factor_of_the_matrix() -> None:
    one = STORED.expert(3)
    np.testing.assert_array_equal(one.take_rows(1, 2).decoded(), EXPECTED[3, 1:])
    np.testing.assert_array_equal(one.take_columns(32, 64).decoded(), EXPECTED[3, :, 32:])
    np.testing.assert_array_equal(one.reordered(np.array([1, 0])).decoded(), EXPECTED[3, ::-1])
    np.testing.assert_array_equal(STORED.row_scales, np.repeat(SCALES, 2))
