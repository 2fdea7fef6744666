"""The order of a head's dimensions on the device, and the RoPE tables."""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.rope import RopeSpec


def head_order(rope: RopeSpec | None, head_dim: int) -> npt.NDArray[np.int64]:
    """The order of a head's dimensions in which RoPE pairs are (i, i + head_dim/2), for any pairing in the
    file.

    Dimensions without RoPE are spread over both halves.
    """
    dimensions = np.arange(head_dim)
    if rope is None:
        return dimensions
    rope_dims = rope.dimensions
    if rope.neox:
        first, second = dimensions[: rope_dims // 2], dimensions[rope_dims // 2 : rope_dims]
    else:
        first, second = dimensions[0:rope_dims:2], dimensions[1:rope_dims:2]
    remainder = dimensions[rope_dims:]
    middle = len(remainder) // 2
    return np.concatenate([first, remainder[:middle], second, remainder[middle:]])


def rope_table(rope: RopeSpec | None, head_dim: int, positions: int) -> npt.NDArray[np.float32]:
    """(positions, head_dim): cosines of the pairs, then sines; 1 and 0 for dimensions without RoPE."""
    half_dim = head_dim // 2
    table = np.zeros((positions, head_dim), np.float32)
    table[:, :half_dim] = 1.0
    if rope is None:
        return table
    rope_dims = rope.dimensions // 2
    both = rope.table(0, positions)
    table[:, :rope_dims], table[:, half_dim : half_dim + rope_dims] = both[:, :rope_dims], both[:, rope_dims:]
    return table
