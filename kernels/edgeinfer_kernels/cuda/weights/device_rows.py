"""What a device is given and gives back: how a token is drawn, and rows that stay there."""

from dataclasses import dataclass
from typing import Protocol


class SampledSettings(Protocol):
    """The sampler settings that the device can follow."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repeat_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...


@dataclass(frozen=True)
class DeviceRows:
    """Rows of the residual stream above the last layer, on the device; `logits` finds them there."""

    first: int
    count: int
    in_step: bool
    """They are of a decode step, whose logits are computed already."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "DeviceRows":
        start, stop, _ = part.indices(self.count)
        return DeviceRows(self.first + start, stop - start, self.in_step)
