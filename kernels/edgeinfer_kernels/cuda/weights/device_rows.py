"""Hidden states that stay on the device."""

from dataclasses import dataclass


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
