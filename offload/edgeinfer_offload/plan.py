"""The memory plan: which bytes of a model lie where, and what reading them costs.

`plan_memory` is a pure function of sizes and devices: it needs no file and no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A part of a model that is placed as a whole. `bytes_per_token`: what decoding one token reads of it."""

    name: str
    nbytes: int
    bytes_per_token: int


@dataclass(frozen=True)
class Device:
    """A place for bytes, with what is free there and how fast it is read (0: not measured)."""

    name: str
    free_bytes: int
    bytes_per_second: float = 0.0


@dataclass(frozen=True)
class PlacedItem:
    """An item and its place."""

    item: str
    device: str
    bytes: int
    ms_per_token: float


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything lies, and what decoding one token from there costs."""

    items: tuple[PlacedItem, ...]
    device: Device

    @property
    def nbytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def ms_per_token(self) -> float:
        return sum(item.ms_per_token for item in self.items)

    def explain(self) -> str:
        """A table for a person: item, device, size, milliseconds a token."""
        width = max((len(item.item) for item in self.items), default=5)
        lines = [f"{'item':{width}}  device      MiB  ms/token"]
        lines += [
            f"{item.item:{width}}  {item.device:6} {item.bytes / 2**20:8.1f}  {item.ms_per_token:8.3f}"
            for item in self.items
        ]
        lines.append(f"{'total':{width}}         {self.nbytes / 2**20:8.1f}  {self.ms_per_token:8.3f}")
        free = self.device.free_bytes / 2**20
        lines.append(f"{self.device.name}: {free:.0f} MiB free before loading")
        if self.ms_per_token:
            rate = self.device.bytes_per_second
            lines[-1] += f", read at {rate / 1e9:.1f} GB/s: at most {1000 / self.ms_per_token:.0f} tokens/s"
        return "\n".join(lines)


class PlanError(ValueError):
    """The items don't fit the device."""


def _mebibytes(nbytes: int) -> str:
    """As "7.3 MiB" or "19456 MiB"."""
    return f"{nbytes / 2**20:.{0 if nbytes >= 100 * 2**20 else 1}f} MiB"


def plan_memory(items: Sequence[Item], device: Device) -> MemoryPlan:
    """Place every item on the one device.

    Raises:
        PlanError: they don't fit; the text has what is wanted, what is free, and the largest item.
    """
    wanted = sum(item.nbytes for item in items)
    if wanted > device.free_bytes:
        largest = max(items, key=lambda item: item.nbytes)
        raise PlanError(
            f"the model needs {_mebibytes(wanted)} on the {device.name}, "
            f"{_mebibytes(device.free_bytes)} may be used; "
            f"the largest part is {largest.name} with {_mebibytes(largest.nbytes)}"
        )
    rate = device.bytes_per_second
    placed = tuple(
        PlacedItem(item.name, device.name, item.nbytes, item.bytes_per_token / rate * 1000 if rate else 0.0)
        for item in items
    )
    return MemoryPlan(placed, device)
