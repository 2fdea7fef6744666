"""The backend of a model whose layers are on several GPUs, one after another.

After a part, the hidden states of a step go through pinned main memory to the next GPU: hidden size · 4 bytes
per token, and one wait of the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import (
    Activations,
    Backend,
    BatchPositions,
    Logits,
    SamplingSettings,
    StateArrays,
)

if TYPE_CHECKING:  # A GPU's libraries are imported only where a model uses it.
    from edgeinfer_kernels.cuda.backend import CudaBackend
    from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
    from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
    from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard
    from edgeinfer_offload.runtime.split_backend import SplitBackend


@dataclass(frozen=True)
class LaterPart:
    """A part after the first, and the buffer in which it gets hidden states."""

    shard: "GpuShard"
    entry: "ExchangeBuffer"


@dataclass
class PipelineStates:
    """Hidden states of the tokens `ids`: on the first GPU after `embed`, on the last one after the layers."""

    ids: Sequence[int]
    rows: Any
    """As the part has them that they are on."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> "PipelineStates":
        return PipelineStates(self.ids[part], self.rows[part])


class PipelineBackend(Backend[PipelineStates]):
    """`first` has the embedding and the first layers, which it may share with the CPU; the last of `later`
    has the head.

    A step of one token takes the sum of the parts' times: several GPUs hold larger models, they don't decode
    faster. The state is that of the parts in their order.
    """

    name = "pipeline"

    def __init__(self, first: "CudaBackend | SplitBackend", later: Sequence[LaterPart]) -> None:
        self._first, self._later = first, tuple(later)
        self._last = self._later[-1].shard
        self.shards = (first, *(part.shard for part in later))
        self.capabilities = replace(
            self._last.capabilities,
            max_batch_tokens=0,
            max_tree_tokens=0,
            takes_lora=False,
            can_evict=all(shard.capabilities.can_evict for shard in self.shards),
        )

    @property
    def gpu_shard(self) -> "GpuShard":
        """The part with the head, next to which a draft head is."""
        return self._last

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As `CudaBackend.keep_hidden`."""
        self._last.keep_hidden(layers)

    def kept_hidden(self, tokens: int) -> list[PipelineStates]:
        return []

    def kept_rows(self, first: int, count: int) -> "DeviceRows":  # type: ignore[override]
        """As `CudaBackend.kept_rows`, for a draft head on the last GPU."""
        return self._last.kept_rows(first, count)

    @property
    def state_nbytes(self) -> int:
        return sum(shard.state_nbytes for shard in self.shards)

    def embed(self, ids: Sequence[int]) -> PipelineStates:
        return PipelineStates(ids, self._first.embed(ids))

    def forward(self, x: PipelineStates, start: int) -> None:
        self._enter_last(x, start)
        x.rows = self._last.enter(x.ids, start)

    def _enter_last(self, x: PipelineStates, start: int) -> None:
        """Run all parts but the last, whose buffer then has the hidden states."""
        self._first.forward(x.rows, start)
        rows, shard = x.rows, self._first
        for part in self._later:
            shard.copy_hidden(rows, part.entry.rows)
            if part.shard is not self._last:
                rows, shard = part.shard.enter(x.ids, start), part.shard

    def logits(self, x: PipelineStates) -> Logits:
        return self._last.logits(x.rows)

    def final_norm(self, x: PipelineStates) -> Activations:
        return self._last.final_norm(x.rows)

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        return self._last.sampling_request(settings, recent, uniform)

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        """As `Backend.sample_next`. No GPU runs ahead: the first one needs the sampled token."""
        self._enter_last(self.embed([token_id]), start)
        return self._last.sample_entered(token_id, start, request, recent)

    def sample_batch(
        self,
        x: PipelineStates,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """As `Backend.sample_batch`, without running ahead, as `sample_next`."""
        return self._last.sample_batch(x.rows, requests, recent)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        for shard in self.shards:
            shard.copy_positions(source, target, count)

    def snapshot(self, end: int) -> StateArrays:
        return [array for shard in self.shards for array in shard.snapshot(end)]

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        first = 0
        for shard in self.shards:
            last = first + len(shard.snapshot(0))
            shard.restore(arrays[first:last], end)
            first = last
        if first != len(arrays):
            raise ValueError(f"saw {len(arrays)} arrays, wanted {first}")

    def checkpoint(self) -> None:
        for shard in self.shards:
            shard.checkpoint()

    def rewind(self, length: int) -> int:
        """As `Backend.rewind`: all parts keep what the one that keeps least does."""
        kept = self.reach(length)
        for shard in self.shards:
            shard.rewind(kept)
        return kept

    def reach(self, length: int) -> int:
        while (kept := min(shard.reach(length) for shard in self.shards)) < length:
            length = kept
        return length

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        for shard in self.shards:
            shard.evict(positions, end)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
