"""ALiBi: attention scores fall with the distance of a key, by a slope of each head."""

import numpy as np
import numpy.typing as npt

MAX_ALIBI_BIAS = 8.0


def alibi_slopes(heads: int, max_bias: float) -> npt.NDArray[np.float32]:
    """(heads,): the slopes; 0 without a bias. Source: Press et al. 2022."""
    if not max_bias:
        return np.zeros(heads, np.float32)
    whole = 1 << (heads.bit_length() - 1)
    index = np.arange(heads)
    first = 2.0 ** (-max_bias / whole * (index + 1))
    between = 2.0 ** (-max_bias / 2 / whole * (2 * (index - whole) + 1))
    return np.where(index < whole, first, between).astype(np.float32)
