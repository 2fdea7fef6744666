"""The memory plan: which bytes of a model lie where, and what reading them costs.

`plan_memory` is a pure function of sizes and devices: it needs no file and no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A part of a model that is placed as a whole. `bytes_per_token`: what decoding one token reads of it.

    `mapped`: it stays in the file's memory map, whose pages the system brings and takes as it likes.
    """

    name: str
    nbytes: int
    bytes_per_token: int
    mapped: bool = False


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


FILE = "file"
"""The place of what stays in the file's memory map."""


@dataclass(frozen=True)
class Repacking:
    """What moving weights into the kernels' layout cost; 0 bytes: they stayed in the file."""

    bytes: int
    seconds: float
    released: bool
    """Whether the file's pages were given back, so that the weights are in memory once."""

    def explain(self) -> str:
        if not self.bytes:
            return "nothing was repacked: the weights are read from the file's memory map"
        pages = "were released" if self.released else "stay mapped"
        return (
            f"repacked {_mebibytes(self.bytes)} in {self.seconds:.2f} s "
            f"({self.bytes / max(self.seconds, 1e-9) / 1e9:.1f} GB/s); the file's pages {pages}"
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything lies, and what decoding one token from there costs."""

    items: tuple[PlacedItem, ...]
    device: Device
    repacking: Repacking | None = None
    """What it cost to bring the weights there; None before it is done."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without what stays in the file."""
        return sum(item.bytes for item in self.items if item.device != FILE)

    @property
    def file_bytes(self) -> int:
        """Bytes that stay in the file's memory map."""
        return sum(item.bytes for item in self.items if item.device == FILE)

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
        total = (self.nbytes + self.file_bytes) / 2**20
        lines.append(f"{'total':{width}}         {total:8.1f}  {self.ms_per_token:8.3f}")
        free = self.device.free_bytes / 2**20
        lines.append(f"{self.device.name}: {free:.0f} MiB free before loading")
        if self.ms_per_token:
            rate = self.device.bytes_per_second
            lines[-1] += f", read at {rate / 1e9:.1f} GB/s: at most {1000 / self.ms_per_token:.0f} tokens/s"
        lines += self._about_the_file()
        return "\n".join(lines)

    def _about_the_file(self) -> list[str]:
        lines = [self.repacking.explain()] if self.repacking else []
        if self.file_bytes:
            lines.append(f"file: {_mebibytes(self.file_bytes)} stay in its memory map")
            room = self.device.free_bytes - self.nbytes
            if self.file_bytes > room:
                lines[-1] += f", {_mebibytes(max(0, room))} of memory are left for it: the rest is read again"
                lines[-1] += " from the disk for every token"
        return lines


class PlanError(ValueError):
    """The items don't fit the device."""


def _mebibytes(nbytes: int) -> str:
    """As "7.3 MiB" or "19456 MiB"."""
    return f"{nbytes / 2**20:.{0 if nbytes >= 100 * 2**20 else 1}f} MiB"


def plan_memory(items: Sequence[Item], device: Device) -> MemoryPlan:
    """Place every item on the one device, but for those that stay in the file.

    Raises:
        PlanError: they don't fit; the text has what is wanted, what is free, and the largest item.
    """
    taken = [item for item in items if not item.mapped]
    wanted = sum(item.nbytes for item in taken)
    if wanted > device.free_bytes:
        largest = max(taken, key=lambda item: item.nbytes)
        raise PlanError(
            f"the model needs {_mebibytes(wanted)} on the {device.name}, "
            f"{_mebibytes(device.free_bytes)} may be used; "
            f"the largest part is {largest.name} with {_mebibytes(largest.nbytes)}"
        )
    rate = device.bytes_per_second
    placed = tuple(
        PlacedItem(
            item.name,
            FILE if item.mapped else device.name,
            item.nbytes,
            item.bytes_per_token / rate * 1000 if rate else 0.0,
        )
        for item in items
    )
    return MemoryPlan(placed, device)
