"""A decoder that is divided between a device and its host, as one backend.

Rows of the residual stream cross where the plan says so, width · 4 bytes a token and way, through a mailbox.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, Rows
from edgeinfer_kernels.expert_routing import PairCounts


class GpuShard(Protocol):
    """The device's half, as `edgeinfer_kernels.cuda.backend.CudaBackend` with divisions."""

    batch: int
    most_recent: int

    def enter(self, tokens: int, start: int) -> Rows:
        """The tokens whose embeddings lie in the mailbox, at positions start…, to above the last layer."""
        ...

    def choose_above(self, start: int, draw: Sequence[float] | None, recent: Sequence[int]) -> int:
        """The token that follows the one whose embedding lies in the mailbox; -1: the host has to sample."""
        ...

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]: ...

    def logits(self, x: Any) -> npt.NDArray[np.float32]: ...

    def normed(self, x: Any) -> npt.NDArray[np.float32]: ...

    def cached(self, end: int) -> list[npt.NDArray[np.generic]]: ...

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None: ...

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None: ...

    def close(self) -> None: ...


class HostPart(Protocol):
    """The host's half, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    def embed(self, ids: Sequence[int]) -> Activations:
        """Embeddings of tokens, in the mailbox."""
        ...

    @property
    def pairs(self) -> PairCounts:
        """How many experts the device has asked for, and how many of them were the host's."""
        ...

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None: ...

    def close(self) -> None: ...


class RowsBetween:
    """Rows of the residual stream on their way: embedded on the host, then above the device's last layer."""

    def __init__(self, embedded: Activations) -> None:
        self.embedded = embedded
        self.above: Rows | None = None

    def __len__(self) -> int:
        return len(self.embedded)

    def __getitem__(self, part: slice) -> "RowsBetween":
        rows = RowsBetween(self.embedded[part])
        rows.above = None if self.above is None else self.above[part]
        return rows


class SplitBackend:
    """`host` has the embedding and its part of the layers, `device` the rest of them and the head."""

    name = "split"

    def __init__(self, host: HostPart, device: GpuShard) -> None:
        self.host = host
        self.device = device
        self.most_recent = device.most_recent

    @property
    def pairs(self) -> PairCounts:
        """How many experts the device has asked for, and how many of them were the host's."""
        return self.host.pairs

    def embed(self, ids: Sequence[int]) -> RowsBetween:
        return RowsBetween(self.host.embed(ids))

    def all_layers(self, x: RowsBetween, start: int) -> None:
        x.above = self.device.enter(len(x), start)

    def logits(self, x: RowsBetween) -> npt.NDArray[np.float32]:
        if x.above is None:
            raise ValueError("these rows have not been up all layers")
        return self.device.logits(x.above)

    def normed(self, x: RowsBetween) -> npt.NDArray[np.float32]:
        if x.above is None:
            raise ValueError("these rows have not been up all layers")
        return self.device.normed(x.above)

    def cached(self, end: int) -> list[npt.NDArray[np.generic]]:
        """The device's keys and values."""
        return self.device.cached(end)

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """As `CachingBackend.put_cached`."""
        self.device.put_cached(arrays, end)

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """As `EvictingBackend.forget`, in the caches of both halves."""
        self.device.forget(gone, end)
        self.host.forget(gone, end)

    def choose(
        self,
        token_id: int,
        start: int,
        draw: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        following: Sequence[float] | None = None,
        room: bool = True,
    ) -> int:
        """Read one token at `start` and choose the next on the device; -1: the host has to sample.

        The device can't run ahead, as the host has the next token's embedding: `following` and `room` are
        what `CudaBackend.choose` takes.
        """
        self.host.embed([token_id])
        return self.device.choose_above(start, draw, recent)

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]:
        """One draw as `choose` takes it."""
        return self.device.draw_request(settings, recent, chance)

    def close(self) -> None:
        try:
            self.device.close()
        finally:
            self.host.close()
