"""The backend of a split model: one GPU shard and one CPU shard.

Hidden states cross between the shards where the plan requires it, hidden size · 4 bytes per token and
direction, through an exchange buffer.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import (
    PAGE,
    Activations,
    Backend,
    BatchPositions,
    ExpertCounts,
    Logits,
    SamplingSettings,
    StateArrays,
)
from edgeinfer_kernels.caches.tree_pages import TreePages
from edgeinfer_kernels.cuda.cache.layout import is_chunk
from edgeinfer_kernels.decoder_state import DecoderState, PageParts, StatePool
from edgeinfer_kernels.lora.weights import LoraError, ModelLora

if TYPE_CHECKING:  # A GPU's libraries are imported only where a model uses it.
    from edgeinfer_kernels.cpu.cpu_shard import CpuShard
    from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
    from edgeinfer_kernels.cuda.offload.gpu_shard import GpuShard


class SplitStates:
    """Hidden states of the tokens `ids` in a split model: embedded on the CPU, then the output of the last
    layer on the GPU.
    """

    def __init__(self, ids: Sequence[int], embedded: Activations) -> None:
        self.ids, self.embedded = ids, embedded
        self.final: DeviceRows | None = None

    def __len__(self) -> int:
        return len(self.embedded)

    def __getitem__(self, part: slice) -> "SplitStates":
        states = SplitStates(self.ids[part], self.embedded[part])
        states.final = None if self.final is None else self.final[part]
        return states


class SplitBackend(Backend[SplitStates]):
    """`cpu_shard` has the embedding and its part of the layers; `gpu_shard` has the others and the head.

    The state is that of the CPU shard's layers, then that of the GPU shard's.
    """

    name = "split"

    def __init__(self, cpu_shard: "CpuShard", gpu_shard: "GpuShard") -> None:
        self.cpu_shard = cpu_shard
        self.gpu_shard = gpu_shard
        self._lora = [ModelLora()]
        """The adapters in use, which all states share."""
        can = gpu_shard.capabilities
        self.capabilities = replace(
            can,
            max_batch_tokens=can.max_batch_tokens * cpu_shard.have_pages,
            max_tree_tokens=min(can.max_tree_tokens, cpu_shard.computed),
        )

    @property
    def state_nbytes(self) -> int:
        return self.cpu_shard.state.nbytes + self.gpu_shard.state_nbytes

    @property
    def expert_counts(self) -> ExpertCounts:
        return self.cpu_shard.expert_counts

    def embed(self, ids: Sequence[int]) -> SplitStates:
        return SplitStates(ids, self.cpu_shard.embed(ids))

    def forward(self, x: SplitStates, start: int) -> None:
        x.final = self.gpu_shard.enter(x.ids, start)

    def forward_tree(self, x: SplitStates, start: int, parents: Sequence[int]) -> None:
        """As `Backend.forward_tree`: the CPU shard has paths in pages, the GPU shard tokens in rows."""
        pages = TreePages(parents, start)
        self.cpu_shard.state.copy_cached(pages.copied_text())
        self.cpu_shard.place(pages.batch(), parents)
        try:
            x.final = self.gpu_shard.enter(x.ids, start, parents=parents)
        finally:
            self.cpu_shard.place(None)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As `CudaBackend.keep_hidden`."""
        self.gpu_shard.keep_hidden(layers)

    def kept_hidden(self, tokens: int) -> list[SplitStates]:
        return []

    def kept_rows(self, first: int, count: int) -> "DeviceRows":  # type: ignore[override]
        """As `CudaBackend.kept_rows`, for a draft head on the GPU."""
        return self.gpu_shard.kept_rows(first, count)

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        return max(TreePages(parents, start).end_page * PAGE, self.gpu_shard.tree_end(start, parents))

    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        self.cpu_shard.state.keep_path(start, rows, TreePages(parents, start).moves(rows))
        self.gpu_shard.keep_path(start, parents, rows)

    def with_state(self, state: DecoderState) -> "SplitBackend":
        """As `Backend.with_state`, for a state of the GPU shard's pool: all states are there."""
        other = copy(self)
        other.gpu_shard = self.gpu_shard.with_state(state)
        return other

    def joined(self, pool: StatePool) -> "SplitBackend":
        return self.with_state(pool.states[0])

    def forward_states(self, x: SplitStates, starts: Sequence[int], states: Sequence[int]) -> None:
        try:
            x.final = self.gpu_shard.enter_states(x.ids, starts, states, self._take_tokens)
        finally:
            self.cpu_shard.place(None)

    def is_at(self, position: int) -> bool:
        return self.gpu_shard.is_at(position)

    def forward_batch(self, x: SplitStates, positions: BatchPositions) -> None:
        try:
            if is_chunk(positions):
                x.final = self._read_chunk(x.ids, positions)
            else:
                x.final = self.gpu_shard.enter_batch(x.ids, positions, self._take_tokens)
        finally:
            self.cpu_shard.place(None)

    def _take_tokens(self, ids: Sequence[int], positions: BatchPositions) -> None:
        """The CPU shard's part of the next step is at these positions."""
        self.cpu_shard.embed(ids)
        self.cpu_shard.place(positions)

    def _read_chunk(self, ids: Sequence[int], positions: BatchPositions) -> "DeviceRows":
        """Process a chunk of a prompt in pages, in as many parts as the CPU needs; the hidden states of the
        last one are kept.
        """
        size = self.cpu_shard.computed if self.cpu_shard.state.blocks else len(ids)
        rows: DeviceRows | None = None
        first = 0
        for first in range(0, len(ids), size):
            part, at = ids[first : first + size], positions.positions[first : first + size]
            pages = positions.pages[first : first + size]
            self._take_tokens(part, BatchPositions(at, pages))
            rows = self.gpu_shard.enter(part, int(at[0]), pages[:1])
        assert rows is not None
        return replace(rows, first=-first, count=len(ids))

    def sample_batch(
        self,
        x: SplitStates,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """As `Backend.sample_batch`. The GPU can't run ahead, because the CPU has the next embeddings."""
        return self.gpu_shard.sample_batch(_final(x), requests, recent)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        self.cpu_shard.state.copy(source, target, count)
        self.gpu_shard.copy_positions(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.cpu_shard.state.copy_pages(sources, targets)
        self.gpu_shard.copy_pages(sources, targets)

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        """As `Backend.read_pages`: the part of the CPU shard, then that of the GPU shard."""
        of_shards = self.cpu_shard.state.read_pages(pages), self.gpu_shard.read_pages(pages)
        return [[*on_cpu, *on_gpu] for on_cpu, on_gpu in zip(*of_shards, strict=True)]

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        self.cpu_shard.state.write_pages(pages, [parts[:1] for parts in contents])
        self.gpu_shard.write_pages(pages, [parts[1:] for parts in contents])

    def logits(self, x: SplitStates) -> Logits:
        return self.gpu_shard.logits(_final(x))

    def copy_hidden(self, x: SplitStates, target: Any) -> None:
        """As `CudaBackend.copy_hidden`."""
        self.gpu_shard.copy_hidden(_final(x), target)

    def final_norm(self, x: SplitStates) -> Activations:
        return self.gpu_shard.final_norm(_final(x))

    def snapshot(self, end: int) -> StateArrays:
        return [*self.cpu_shard.state.snapshot(end), *self.gpu_shard.snapshot(end)]

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        used = self.cpu_shard.state.restore(arrays, end)
        self.gpu_shard.restore(arrays[used:], end)

    def checkpoint(self) -> None:
        self.cpu_shard.state.checkpoint()
        self.gpu_shard.checkpoint()

    def rewind(self, length: int) -> int:
        kept = self.cpu_shard.state.rewind(length)
        return self.cpu_shard.state.rewind(self.gpu_shard.rewind(kept))

    def reach(self, length: int) -> int:
        slots = self.cpu_shard.slots
        kept = length if slots is None else slots.reach(length)
        kept = self.gpu_shard.reach(kept)
        return kept if slots is None else slots.reach(kept)

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        self.gpu_shard.evict(positions, end)
        if self.cpu_shard.state.blocks:
            self.cpu_shard.state.evict(positions, end)

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        return self.gpu_shard.sampling_request(settings, recent, uniform)

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        """As `Backend.sample_next`. The GPU can't run ahead, because the CPU has the next embedding."""
        self.cpu_shard.embed([token_id])
        return self.gpu_shard.sample_entered(token_id, start, request, recent)

    def set_lora(self, lora: ModelLora) -> None:
        """As `Backend.set_lora`: each device takes the adapters of its shards."""
        self.cpu_shard.set_lora(lora)
        try:
            self.gpu_shard.set_lora(replace(lora, embedding=None))
        except LoraError:
            self.cpu_shard.set_lora(self._lora[0])
            raise
        self._lora[0] = lora

    def close(self) -> None:
        try:
            self.gpu_shard.close()
        finally:
            self.cpu_shard.close()


def _final(x: SplitStates) -> "DeviceRows":
    if x.final is None:
        raise ValueError("these hidden states have not passed the layers")
    return x.final
