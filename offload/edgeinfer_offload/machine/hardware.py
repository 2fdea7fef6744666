"""A machine as the planner sees it: what is free, how fast it is read, what the way between costs."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KERNEL_SHARE = 0.9
"""Of the read bandwidth: what our kernels reach in a format that hasn't been measured."""
LAUNCH_SECONDS = 4e-6
"""What a kernel of a decode step takes beside reading: measured on an H200, 160 kernels a step."""
HAND_OVER_SECONDS = 10e-6
"""Activations to the other side and back within a graph, where it hasn't been measured: an H200's."""
CACHE_CEILING = 2.0e12
"""Bytes per second of keys and values, counted as float16, that attention reads at most: measured on an H200
at depth 4096. Smaller types take it as long an element as float16 does: they have to be widened.
"""
CPU_BLOCK_SECONDS = 5e-6
"""What a block takes the thread team beside reading, where it isn't measured."""
CHOOSING_SECONDS = 10e-6
"""What a mixture's router and choice take a GPU beside launches and reading: a long chain of comparisons."""
EXPERTS_SECONDS = 11e-6
"""What some experts of a mixture take a GPU beside launches and reading: one token gives them little to do
at a time. Both measured on an H200.
"""
CPU_EXPERTS_SECONDS = 15e-6
"""What starting some of a mixture's experts on the thread team takes: six barriers of 12 threads."""
CPU_EXPERTS_SHARE = 0.9
"""Of the rate of large matrices: what reading a few experts here and there reaches."""
SYNCHRONIZE_SECONDS = 9e-6
"""What a token costs the host when a GPU has worked on it: replay and synchronization, an H200's."""
DIVIDED_SECONDS = 160e-6
"""The same of a divided model, for which nothing can run ahead: the embedding, a recorded step's launch, the
choice; a server's.
"""
OVERLAP_LOSS = 0.25
"""Of the shorter half of a split feed-forward: what running both at once doesn't save, as threads wake late
and copies want memory's bandwidth too; assumed, to be measured. It keeps what fits a GPU on the GPU.
"""
UNPACKING_PASSES = 16
"""How often the GPU's memory could be read while a byte of the CPU's weights becomes float16 there; assumed
where it isn't measured.
"""
DISK_BYTES_PER_SECOND = 2.0e9
"""What a memory map brings from an SSD, page by page with read-ahead; assumed where it isn't measured."""

Origin = Literal["measured", "described", "unmeasured"]
"""unmeasured: what is free is known, speeds are not."""


@dataclass(frozen=True)
class Processor:
    """The CPU with `threads` at work, and main memory. `kernels`: format -> bytes per second achieved.

    `operations_per_second`: in the products of prompts, two for a weight and a token.
    """

    name: str
    threads: int
    total_bytes: int
    free_bytes: int
    bytes_per_second: float
    operations_per_second: float
    kernels: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    """Format -> operations per second in the products of prompts, where it is known."""

    block_seconds: float = CPU_BLOCK_SECONDS
    """What a block of a layer takes beside reading: its threads meet between phases."""
    token_seconds: float = 0.0
    """What a token takes once beside its layers."""

    def rate(self, format_name: str) -> float:
        """Bytes per second at which weights of a format are read and multiplied with."""
        return self.kernels.get(format_name, KERNEL_SHARE * self.bytes_per_second)

    def slowness(self, format_name: str) -> float:
        """How many times as long a prompt's product takes with weights of a format as with others."""
        known = self.products.get(format_name)
        return self.operations_per_second / known if known else 1.0

    @property
    def cache_rate(self) -> float:
        """Bytes per second of keys and values."""
        return KERNEL_SHARE * self.bytes_per_second


@dataclass(frozen=True)
class Graphics:
    """A GPU. `context_bytes`: what the driver will still take of `free_bytes` before anything is loaded."""

    name: str
    index: int
    total_bytes: int
    free_bytes: int
    bytes_per_second: float
    operations_per_second: float
    launch_seconds: float = LAUNCH_SECONDS
    context_bytes: int = 0
    kernels: Mapping[str, float] = field(default_factory=dict)
    unpacking: Mapping[str, float] = field(default_factory=dict)
    """Format -> bytes per second of the CPU's weights that become float16 here."""

    def rate(self, format_name: str) -> float:
        """Bytes per second at which weights of a format are read; a launch's own time comes on top."""
        return self.kernels.get(format_name, self.bytes_per_second)

    def unpacked_rate(self, format_name: str) -> float:
        """Bytes per second at which weights that the CPU has sent become float16."""
        return self.unpacking.get(format_name, self.bytes_per_second / UNPACKING_PASSES)

    def cache_seconds(self, nbytes: float, as_halves: float) -> float:
        """Seconds that reading keys and values takes, which would be `as_halves` bytes in float16."""
        return max(nbytes / (0.8 * self.bytes_per_second), as_halves / CACHE_CEILING)


@dataclass(frozen=True)
class Link:
    """The way between main memory and a GPU: bytes per second of large copies, and one layer's hand-over."""

    to_gpu: float
    from_gpu: float
    pageable_to_gpu: float
    pageable_from_gpu: float
    hand_over_seconds: float = HAND_OVER_SECONDS
    pins_in_place: bool = True
    """Whether the system pins main memory where it lies; else prompts send weights through a pinned ring."""


@dataclass(frozen=True)
class Machine:
    """Everything that a plan depends on beside the model. Without a GPU neither graphics nor link."""

    processor: Processor
    graphics: Graphics | None = None
    link: Link | None = None
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND
    origin: Origin = "measured"

    def to_json(self) -> str:
        """All of it as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """What `to_json` wrote.

        Raises:
            ValueError: no JSON of a machine; a field is missing, unknown or of another kind.
        """
        fields = _object(json.loads(text), cls)
        graphics, link = fields.get("graphics"), fields.get("link")
        return cls(
            **fields
            | {
                "processor": Processor(**_object(fields["processor"], Processor)),
                "graphics": None if graphics is None else Graphics(**_object(graphics, Graphics)),
                "link": None if link is None else Link(**_object(link, Link)),
            }
        )


def _object(value: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass, checked by name and kind."""
    if not isinstance(value, dict):
        raise ValueError(f"saw {value!r}, wanted a {kind.__name__}")
    known = {f.name: f for f in dataclasses.fields(kind)}
    needed = {
        name
        for name, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if not needed <= value.keys() <= known.keys():
        odd = sorted(value.keys() ^ needed)
        raise ValueError(f"{kind.__name__}: fields {', '.join(map(str, odd))}")
    for name, seen in value.items():
        if known[name].type in (int, float) and (isinstance(seen, bool) or not isinstance(seen, int | float)):
            raise ValueError(f"{kind.__name__}.{name}: saw {seen!r}, wanted a number")
    return dict(value)
