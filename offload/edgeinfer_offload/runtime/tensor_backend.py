"""The backend of a model whose layers are divided among several GPUs (tensor parallel).

Each GPU has a process, a rank, with a part of every layer. This backend sends each call to all of them; they
exchange their partial sums themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import (
    Activations,
    Backend,
    BackendError,
    BatchPositions,
    Logits,
    SamplingSettings,
    StateArrays,
)
from edgeinfer_kernels.capabilities import Capabilities
from edgeinfer_kernels.decoder_state import PageParts
from edgeinfer_kernels.lora.weights import LoraError, ModelLora
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_offload.runtime.rank_processes import RankError, RankProcesses

Array = TypeVar("Array", bound=npt.NDArray[Any])
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "LoraError": LoraError}
"""Exceptions of a rank that leave it alive, by their names."""


@dataclass(frozen=True)
class RankReady:
    """What a rank returns when its part is loaded: bytes on its GPU, and what computes the sums of a step."""

    capabilities: Capabilities
    state_nbytes: int
    nbytes: int
    sums: str


@dataclass(frozen=True)
class TensorStates:
    """Hidden states of the tokens `ids` on the ranks; `first`: the index of the first of them in the step."""

    ids: tuple[int, ...]
    first: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> "TensorStates":
        start, _, _ = part.indices(len(self.ids))
        return TensorStates(self.ids[part], self.first + start)


@dataclass(frozen=True)
class KeptRows:
    """States that a rank keeps for its draft head, from a position of the text on."""

    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "KeptRows":
        start, stop, _ = part.indices(self.count)
        return KeptRows(self.first + start, stop - start)


class TensorBackend(Backend[TensorStates]):
    """Calls of all ranks; results are those of the first one. The state is that of the ranks in order."""

    name = "tensor parallel"

    def __init__(self, processes: RankProcesses, tokens: int, matrices: Sequence[Matrix] = ()) -> None:
        """`tokens`: maximum tokens of a step. `matrices`: of the model, in the order of `DecoderWeights`, by
        which adapters are sent.
        """
        self._matrices = matrices
        self.processes = processes
        self.batch = tokens
        self.ranks: list[RankReady] = processes.ready
        kept = max(rank.capabilities.kept_states for rank in self.ranks)
        self.capabilities = replace(
            self.ranks[0].capabilities, max_joined_tokens=0, text_tokens=0, kept_states=kept
        )

    @property
    def state_nbytes(self) -> int:
        return sum(rank.state_nbytes for rank in self.ranks)

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._call_each(method, *arguments)[0]

    def _call_each(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return self.processes.call(method, *arguments)
        except RankError as error:
            raise ERRORS.get(error.kind, BackendError)(str(error)) from error

    def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        """The result of a rank for a method to which each replies."""
        return self._call_each(method, *arguments)[rank]

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As `CudaBackend.keep_hidden`: a rank keeps those for its draft head."""
        if layers:
            raise ValueError(
                f"hidden states after {layers[0]} layers: a GPU keeps them only for a draft head"
            )

    def kept_hidden(self, tokens: int) -> list[TensorStates]:
        return []

    def kept_rows(self, first: int, count: int) -> KeptRows:  # type: ignore[override]
        """As `Backend.kept_rows`, for a head in the process of a rank."""
        return KeptRows(first, count)

    def embed(self, ids: Sequence[int]) -> TensorStates:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        return TensorStates(tuple(ids))

    def forward(self, x: TensorStates, start: int) -> None:
        self._call("forward", list(x.ids), start)

    def logits(self, x: TensorStates) -> Logits:
        logits: Logits = self._call("logits", x.first, len(x))
        return logits

    def final_norm(self, x: TensorStates) -> Activations:
        rows: Activations = self._call("final_norm", x.first, len(x))
        return rows

    def sampling_request(self, settings: SamplingSettings, recent: int, uniform: float) -> list[float]:
        from edgeinfer_kernels.cuda.decode.sampling import DeviceSamplingParams

        return DeviceSamplingParams.of(settings).request(recent, uniform)

    def best_ids(self, ids: Sequence[int], start: int, parents: Sequence[int] = ()) -> list[int]:
        best: list[int] = self._call("best_ids", list(ids), start, list(parents))
        return best

    def forward_tree(self, x: TensorStates, start: int, parents: Sequence[int]) -> None:
        self._call("forward_tree", list(x.ids), start, list(parents))

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        """As `CudaBackend.tree_end`."""
        return start + 1 + len(parents)

    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        self._call("keep_path", start, list(parents), list(rows))

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        next_request: Sequence[float] | None = None,
        may_run_ahead: bool = True,
    ) -> int:
        """As `Backend.sample_next`. Every rank samples the same id from the gathered logits, and may run
        ahead: so the GPUs compute while the id is on its way.
        """
        sampled: int = self._call(
            "sample_next", token_id, start, request, recent, next_request, may_run_ahead
        )
        return sampled

    def forward_batch(self, x: TensorStates, positions: BatchPositions) -> None:
        self._call("forward_batch", list(x.ids), positions)

    def sample_batch(
        self,
        x: TensorStates,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None = None,
    ) -> list[int]:
        """As `Backend.sample_batch`; as in `sample_next`, every rank samples."""
        sampled: list[int] = self._call("sample_batch", requests, recent, following)
        return sampled

    def set_lora(self, lora: ModelLora) -> None:
        found = enumerate(self._matrices)
        adapters = {at: lora.matrices[id(each)] for at, each in found if id(each) in lora.matrices}
        self._call("set_lora", adapters, lora.embedding)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._call("copy_pages", list(sources), list(targets))

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        of_ranks = self._call_each("read_pages", list(pages))
        return [_joined(parts) for parts in zip(*of_ranks, strict=True)]

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        self._call("write_pages", list(pages), list(contents))

    def copy_positions(self, source: int, target: int, count: int) -> None:
        self._call("copy_positions", source, target, count)

    def snapshot(self, end: int) -> StateArrays:
        return _joined(self._call_each("snapshot", end))

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        self._call("restore", self._parts(arrays), end)

    def _parts(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[StateArrays]:
        """The arrays of each rank. Raises `ValueError`: not as many of each."""
        count = len(arrays) // len(self.ranks)
        if len(arrays) % len(self.ranks):
            raise ValueError(f"saw {len(arrays)} arrays, wanted as many of each of {len(self.ranks)} GPUs")
        return [list(arrays[at * count : (at + 1) * count]) for at in range(len(self.ranks))]

    def checkpoint(self) -> None:
        """No block is recurrent."""

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        self._call("evict", positions, end)

    def close(self) -> None:
        self.processes.close()


def _joined(parts: Sequence[list[Array]]) -> list[Array]:
    """The arrays of all ranks, one rank after another."""
    return [array for arrays in parts for array in arrays]
