"""The factors of queries that grow with the position (temperature of attention)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale · ln(1 + ⌊(p + offset) / length⌋)."""

    scale: float
    length: int
    offset: int = 0

    def __bool__(self) -> bool:
        return self.scale != 0

    def factors(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The factors of the queries at these positions."""
        return 1 + self.scale * np.log1p((positions + self.offset) // self.length)

    def table(self, positions: int) -> npt.NDArray[np.float32]:
        """The factors of ⌊(p + offset) / length⌋ = 0, 1, … for the first `positions` positions."""
        starts = np.arange(0, positions + self.offset, self.length) - self.offset
        return self.factors(starts).astype(np.float32)


NO_TEMPERATURE = Temperature(0.0, 1)
"""All factors are 1."""
