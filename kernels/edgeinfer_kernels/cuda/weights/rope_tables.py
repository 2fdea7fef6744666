"""The order of a head's dimensions on the device, and the RoPE tables."""

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.rope import RopeSpec


def head_order(rope: RopeSpec | None, head_dim: int) -> npt.NDArray[np.int64]:
    """The order of a head's dimensions in which RoPE pairs are (i, i + head_dim/2), for any pairing in the
    file.

    Dimensions without RoPE are spread over both halves.
    """
    dimensions = np.arange(head_dim)
    if rope is None:
        return dimensions
    turned = rope.dimensions
    if rope.neox:
        first, second = dimensions[: turned // 2], dimensions[turned // 2 : turned]
    else:
        first, second = dimensions[0:turned:2], dimensions[1:turned:2]
    rest = dimensions[turned:]
    middle = len(rest) // 2
    return np.concatenate([first, rest[:middle], second, rest[middle:]])


def rope_table(rope: RopeSpec | None, head_dim: int, positions: int) -> npt.NDArray[np.float32]:
    """(positions, head_dim): cosines of the pairs, then sines; 1 and 0 for dimensions without RoPE."""
    half = head_dim // 2
    table = np.zeros((positions, head_dim), np.float32)
    table[:, :half] = 1.0
    if rope is None:
        return table
    turned = rope.dimensions // 2
    both = rope.table(0, positions)
    table[:, :turned], table[:, half : half + turned] = both[:, :turned], both[:, turned:]
    return table
