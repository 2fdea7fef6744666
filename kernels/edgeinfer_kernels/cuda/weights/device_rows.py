"""Input and output types of a device: sampling parameters, and hidden states that stay on the device."""

from dataclasses import dataclass
from typing import Protocol


class SampledSettings(Protocol):
    """The sampling parameters that the device supports."""

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
    """Hidden states after the last layer, on the device; `logits` reads them there."""

    first: int
    count: int
    in_step: bool
    """Whether they are of a decode step, whose logits are already computed."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "DeviceRows":
        start, stop, _ = part.indices(self.count)
        return DeviceRows(self.first + start, stop - start, self.in_step)
