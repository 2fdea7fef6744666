"""Rotary position embedding (RoPE)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class RopeSpec:
    """RoPE: pair i is rotated by position · inverse_frequencies[i]; all scalings are already applied.

    `neox`: pairs are (i, i + dimensions/2) as in NeoX; otherwise (2i, 2i + 1). Cosine and sine are
    multiplied by `magnitude`. `shift` is added to positions.
    """

    inverse_frequencies: tuple[float, ...]
    neox: bool
    magnitude: float = 1.0
    shift: int = 0

    @property
    def dimensions(self) -> int:
        return 2 * len(self.inverse_frequencies)

    def table(self, start: int, count: int, dtype: npt.DTypeLike = np.float32) -> Array:
        """(count, dimensions): the cosines, then the sines, of positions start…"""
        positions = self.shift + np.arange(start, start + count, dtype=np.float64)
        angles = positions[:, None] * np.asarray(self.inverse_frequencies, np.float64)
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self.magnitude
        return np.ascontiguousarray(both.astype(dtype))

    def apply(self, x: Array, table: Array) -> Array:
        """x (..., head_dim) with RoPE from a `table` that broadcasts to the rows of x; dimensions beyond the
        RoPE dimensions are unchanged.
        """
        half_dim = self.dimensions // 2
        cosine, sine = table[..., :half_dim], table[..., half_dim:]
        y = x.copy()
        first, second = (
            (slice(0, half_dim), slice(half_dim, 2 * half_dim))
            if self.neox
            else (slice(0, 2 * half_dim, 2), slice(1, 2 * half_dim, 2))
        )
        y[..., first] = x[..., first] * cosine - x[..., second] * sine
        y[..., second] = x[..., first] * sine + x[..., second] * cosine
        return y
