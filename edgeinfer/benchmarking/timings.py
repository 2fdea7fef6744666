"""Statistics of repeated measurements: rates with their spread, best decile, median, ratios."""

from dataclasses import dataclass

import numpy as np

BEST_DECILE, MEDIAN = 0.1, 0.5
MAX_SPREAD = 0.1
"""Maximum spread of repeated pieces; above it, a measurement is too noisy."""
MIN_PIECES = 4


@dataclass(frozen=True)
class Timings:
    """Seconds of equal pieces of work, each of `tokens` tokens, in order of execution. `joules`: the energy
    of all pieces; None: unknown.
    """

    seconds: tuple[float, ...]
    tokens: int = 1
    joules: float | None = None

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0 or self.tokens < 1:
            raise ValueError(f"timings of {self.tokens} tokens: {self.seconds}, wanted positive seconds")

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each piece."""
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def mean_rate(self) -> float:
        """Mean of the rates, as in llama-bench."""
        return float(np.mean(self.rates))

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the rates; 0 for a single one."""
        return float(np.std(self.rates, ddof=1)) if len(self.seconds) > 1 else 0.0

    @property
    def joules_per_token(self) -> float | None:
        """Mean energy of a token; None: unknown."""
        return None if self.joules is None else self.joules / (self.tokens * len(self.seconds))

    @property
    def mean_seconds(self) -> float:
        """Mean time of a piece."""
        return float(np.mean(self.seconds))

    def seconds_at(self, share: float) -> float:
        """The quantile of the times at `share`, interpolated."""
        return float(np.quantile(self.seconds, share))

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 for fewer than 4."""
        if len(self.seconds) < MIN_PIECES:
            return 0.0
        return (self.seconds_at(0.75) - self.seconds_at(0.25)) / self.seconds_at(MEDIAN)

    @property
    def is_noisy(self) -> bool:
        """Whether the measurement varied too much, for example because of other programs or the CPU clock."""
        return self.spread > MAX_SPREAD

    def rate_at(self, share: float) -> float:
        """Tokens per second at the quantile `share`, fastest first."""
        return self.tokens / self.seconds_at(share)


def speed_ratio(ours: Timings, theirs: Timings, share: float) -> float:
    """Our speed over theirs, both at the same quantile of the pieces of each."""
    return ours.rate_at(share) / theirs.rate_at(share)
