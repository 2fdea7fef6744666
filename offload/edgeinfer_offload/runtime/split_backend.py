"""The backend of a split model: one GPU shard and one CPU shard.

Hidden states cross between the shards where the plan requires it, hidden size · 4 bytes per token and
direction, through an exchange buffer.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Activations, Rows
from edgeinfer_kernels.expert_routing import PairCounts


class GpuShard(Protocol):
    """The GPU shard, as `edgeinfer_kernels.cuda.backend.CudaBackend` with layer splits."""

    batch: int
    most_recent: int

    def enter(self, tokens: int, start: int) -> Rows:
        """Run the tokens whose embeddings are in the exchange buffer, at positions from `start`, through all
        layers.
        """
        ...

    def choose_above(self, start: int, draw: Sequence[float] | None, recent: Sequence[int]) -> int:
        """The token sampled after the one whose embedding is in the exchange buffer; -1: the host has to
        sample.
        """
        ...

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]: ...

    def logits(self, x: Any) -> npt.NDArray[np.float32]: ...

    def normed(self, x: Any) -> npt.NDArray[np.float32]: ...

    def cached(self, end: int) -> list[npt.NDArray[np.generic]]: ...

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None: ...

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None: ...

    def close(self) -> None: ...


class HostPart(Protocol):
    """The CPU shard, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    def embed(self, ids: Sequence[int]) -> Activations:
        """Write the embeddings of tokens to the exchange buffer."""
        ...

    @property
    def pairs(self) -> PairCounts:
        """Number of token-expert assignments from the GPU, and how many of them the CPU computed."""
        ...

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None: ...

    def close(self) -> None: ...


class RowsBetween:
    """Hidden states in transit: embedded on the CPU, then the output of the last layer on the GPU."""

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
    """`host` has the embedding and its part of the layers; `device` has the other layers and the output
    matrix.
    """

    name = "split"

    def __init__(self, host: HostPart, device: GpuShard) -> None:
        self.host = host
        self.device = device
        self.most_recent = device.most_recent

    @property
    def pairs(self) -> PairCounts:
        """Number of token-expert assignments from the GPU, and how many of them the CPU computed."""
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
        """The GPU's keys and values."""
        return self.device.cached(end)

    def put_cached(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """As `CachingBackend.put_cached`."""
        self.device.put_cached(arrays, end)

    def forget(self, gone: npt.NDArray[np.int64], end: int) -> None:
        """As `EvictingBackend.forget`, in the caches of both shards."""
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
        """Process one token at `start` and sample the next on the GPU; -1: the host has to sample.

        The GPU can't run ahead, because the host has the next token's embedding: `following` and `room` only
        match the signature of `CudaBackend.choose`.
        """
        self.host.embed([token_id])
        return self.device.choose_above(start, draw, recent)

    def draw_request(self, settings: Any, recent: int, chance: float) -> list[float]:
        """One sampling request, in the format that `choose` takes."""
        return self.device.draw_request(settings, recent, chance)

    def close(self) -> None:
        try:
            self.device.close()
        finally:
            self.host.close()
