"""A machine for the planner: free memory, read bandwidth, and CPU-GPU transfer costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from edgeinfer_offload.machine.cost_constants import (
    CPU_BLOCK_SECONDS,
    DISK_BYTES_PER_SECOND,
    DISK_READ_SECONDS,
    KERNEL_SHARE,
    KV_READ_SHARE,
    LAUNCH_SECONDS,
    MAX_KV_BYTES_PER_SECOND,
    SYNC_SECONDS,
    UNPACKING_PASSES,
)

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
class Link:
    """The CPU-GPU link: bytes per second of large copies, and seconds of one layer's synchronization."""

    to_gpu: float
    from_gpu: float
    pageable_to_gpu: float
    pageable_from_gpu: float
    sync_seconds: float = SYNC_SECONDS
    pins_in_place: bool = True
    """Whether the system can pin existing main memory; else prefill streams weights through a pinned ring."""


@dataclass(frozen=True)
class Graphics:
    """A GPU. `context_bytes`: part of `free_bytes` that the driver takes before anything is loaded."""

    name: str
    index: int
    total_bytes: int
    free_bytes: int
    bytes_per_second: float
    operations_per_second: float
    link: Link
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

    def cache_seconds(self, nbytes: float, as_f16: float) -> float:
        """Seconds to read `nbytes` of keys and values, whose size in float16 would be `as_f16` bytes."""
        return max(nbytes / (KV_READ_SHARE * self.bytes_per_second), as_f16 / MAX_KV_BYTES_PER_SECOND)


@dataclass(frozen=True)
class PeerSums:
    """How GPUs add up partial sums: what does it, or the link; seconds of the sum of a token's hidden states,
    and bytes per second of a large one.
    """

    name: str
    sum_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Disk:
    """The disk with the model's file, read past the page cache with dozens of reads in flight: bytes per
    second of large reads, and the seconds that each read takes besides.
    """

    bytes_per_second: float = DISK_BYTES_PER_SECOND
    read_seconds: float = DISK_READ_SECONDS

    def seconds(self, reads: float, nbytes: float) -> float:
        """Seconds of `reads` reads of `nbytes` each."""
        return reads * (self.read_seconds + nbytes / self.bytes_per_second)


@dataclass(frozen=True)
class Machine:
    """All machine inputs of a plan: the CPU with main memory, and any number of GPUs. The planner places
    weights on the CPU and on the first GPU.
    """

    processor: Processor
    gpus: tuple[Graphics, ...] = ()
    disk: Disk = Disk()
    origin: Origin = "measured"
    peers: PeerSums | None = None
    """How the GPUs add up partial sums, if there are several; None: they can't."""

    @property
    def graphics(self) -> Graphics | None:
        """The first GPU."""
        return self.gpus[0] if self.gpus else None

    @property
    def link(self) -> Link | None:
        """The link to the first GPU."""
        return self.gpus[0].link if self.gpus else None

    def with_gpu(self, graphics: Graphics) -> "Machine":
        """The machine with this GPU instead of its first one."""
        return replace(self, gpus=(graphics, *self.gpus[1:]))
