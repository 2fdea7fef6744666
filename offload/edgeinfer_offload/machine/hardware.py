"""A machine for the planner: free memory, read bandwidth, and CPU-GPU transfer costs."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KERNEL_SHARE = 0.9
"""Share of the read bandwidth that the kernels reach in a format that isn't measured."""
LAUNCH_SECONDS = 4e-6
"""Seconds per kernel of a decode step besides reading; measured on an H200, 160 kernels per step."""
HAND_OVER_SECONDS = 10e-6
"""Seconds of one CPU-GPU synchronization (activations there and back) within a graph. Used if it isn't
measured; from an H200."""
CACHE_CEILING = 2.0e12
"""Upper limit for attention reading keys and values, in float16 bytes per second; measured on an H200 at
depth 4096. Smaller types take as long per element as float16, because they are widened."""
CPU_BLOCK_SECONDS = 5e-6
"""Seconds per block of the CPU thread pool besides reading, if it isn't measured."""
CHOOSING_SECONDS = 10e-6
"""GPU seconds of an MoE router and expert selection besides launches and reading: a long chain of
comparisons."""
EXPERTS_SECONDS = 11e-6
"""GPU seconds of the experts of an MoE layer besides launches and reading: one token gives little parallel
work. Both measured on an H200."""
CPU_EXPERTS_SECONDS = 15e-6
"""Seconds to start MoE experts on the CPU thread pool: six barriers of 12 threads."""
CPU_EXPERTS_SHARE = 0.9
"""Share of the rate of large matrices that reading a few scattered experts reaches."""
SYNCHRONIZE_SECONDS = 9e-6
"""Host seconds per token if a GPU has worked on it: graph replay and synchronization, on an H200."""
DIVIDED_SECONDS = 160e-6
"""The same for a split model, which can't run ahead: embedding, launch of a captured step, sampling; on a
server."""
OVERLAP_LOSS = 0.25
"""Share of the shorter shard of a split feed-forward that overlap doesn't save: threads wake late and copies
also use memory bandwidth. Assumed, not measured yet. It keeps what fits on the GPU."""
UNPACKING_PASSES = 16
"""Reads of GPU memory in the time that one byte of CPU weights takes to become float16 there; assumed if it
isn't measured."""
DISK_BYTES_PER_SECOND = 2.0e9
"""Bytes per second of a memory map on an SSD, page by page with read-ahead; assumed if it isn't measured."""

Origin = Literal["measured", "described", "unmeasured"]
"""unmeasured: free memory is known, speeds are not."""


@dataclass(frozen=True)
class Processor:
    """The CPU with its `threads`, and main memory. `kernels`: format -> bytes per second achieved.

    `operations_per_second`: in prefill matmul, two per weight and token.
    """

    name: str
    threads: int
    total_bytes: int
    free_bytes: int
    bytes_per_second: float
    operations_per_second: float
    kernels: Mapping[str, float] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)
    """Format -> operations per second in prefill matmul, where known."""

    block_seconds: float = CPU_BLOCK_SECONDS
    """Seconds per block of a layer besides reading, for the barriers between phases."""
    token_seconds: float = 0.0
    """Seconds per token besides the layers."""

    def rate(self, format_name: str) -> float:
        """Bytes per second at which weights of a format are read and multiplied."""
        return self.kernels.get(format_name, KERNEL_SHARE * self.bytes_per_second)

    def slowness(self, format_name: str) -> float:
        """How many times as long a prefill matmul takes with weights of this format as with the
        default ones.
        """
        known = self.products.get(format_name)
        return self.operations_per_second / known if known else 1.0

    @property
    def cache_rate(self) -> float:
        """Bytes per second at which keys and values are read."""
        return KERNEL_SHARE * self.bytes_per_second


@dataclass(frozen=True)
class Graphics:
    """A GPU. `context_bytes`: part of `free_bytes` that the driver takes before anything is loaded."""

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
    """Format -> bytes per second at which CPU weights are dequantized to float16 on this GPU."""

    def rate(self, format_name: str) -> float:
        """Bytes per second at which weights of a format are read, excluding kernel launch time."""
        return self.kernels.get(format_name, self.bytes_per_second)

    def unpacked_rate(self, format_name: str) -> float:
        """Bytes per second at which streamed weights are dequantized to float16."""
        return self.unpacking.get(format_name, self.bytes_per_second / UNPACKING_PASSES)

    def cache_seconds(self, nbytes: float, as_halves: float) -> float:
        """Seconds to read `nbytes` of keys and values, whose size in float16 would be `as_halves` bytes."""
        return max(nbytes / (0.8 * self.bytes_per_second), as_halves / CACHE_CEILING)


@dataclass(frozen=True)
class Link:
    """The CPU-GPU link: bytes per second of large copies, and seconds of one layer's synchronization."""

    to_gpu: float
    from_gpu: float
    pageable_to_gpu: float
    pageable_from_gpu: float
    hand_over_seconds: float = HAND_OVER_SECONDS
    pins_in_place: bool = True
    """Whether the system can pin existing main memory; else prefill streams weights through a pinned ring."""


@dataclass(frozen=True)
class Machine:
    """All machine inputs of a plan. Without a GPU, graphics and link are None."""

    processor: Processor
    graphics: Graphics | None = None
    link: Link | None = None
    disk_bytes_per_second: float = DISK_BYTES_PER_SECOND
    origin: Origin = "measured"

    def to_json(self) -> str:
        """The machine as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Parse the output of `to_json`.

        Raises:
            ValueError: no JSON of a machine; a field is missing, unknown or of another type.
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
    """The fields of a dataclass, with names and types checked."""
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
