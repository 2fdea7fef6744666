"""The process of one rank of tensor parallel: loads its part of the model on its GPU, then executes commands.

It is started as `python -m edgeinfer.loading.tensor.rank FD`, see `rank_service.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.hugging_face.folder_file import FolderFile
from edgeinfer.hugging_face.powerinfer_file import PowerInferFile
from edgeinfer.loading.model_source import LoadProgress, ModelSource
from edgeinfer.loading.tensor.job import HeadJob, TensorJob
from edgeinfer.loading.tensor.rank_head import RankHead
from edgeinfer.model_config.support import open_model
from edgeinfer.model_config.weights import read_config
from edgeinfer.options import LoadOptions
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import BatchPositions, StateArrays
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import BATCH, TEXT, Layout
from edgeinfer_kernels.cuda.current_device import current
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, named_device
from edgeinfer_kernels.cuda.tensor.torch_collective import TorchCollective, join_group
from edgeinfer_kernels.cuda.tuning.step_profile import KernelProfile, KernelRun
from edgeinfer_kernels.decoder_state import PageParts
from edgeinfer_kernels.lora.tensor import tensor_lora
from edgeinfer_kernels.lora.weights import LoraWeights, ModelLora
from edgeinfer_kernels.sizes.cuda_buffers import ALL_STEP_SIZES, COMMON_STEP_SIZES
from edgeinfer_kernels.tensor_parts import tensor_part
from edgeinfer_offload.runtime.rank_service import run_rank
from edgeinfer_offload.runtime.tensor_backend import RankReady
from edgeinfer_offload.runtime.tensor_head import HeadReady


class TensorRank:
    """A loaded part, as `RankService`."""

    each_replies = frozenset(("snapshot", "read_pages", "load_head", "call_head"))
    _profile: KernelProfile | None = None

    def __init__(self, job: TensorJob, on_progress: Callable[[int, int], None]) -> None:
        self.rank = job.rank
        device = named_device(job.device)
        with current(device):
            join_group(device, job.store, job.rank, len(job.shares))
            self._collective = TorchCollective(device, job.store, job.sums)
        self._rows = DeviceRows(0, 0, False)
        self._source, self._chunk = _opened(job, on_progress), job.chunk
        self._matrices = self._source.weights.matrices()
        self._head: RankHead | None = None
        self._backend = self._load(job)
        if job.tuned_seconds:
            self._backend.tune(user_folder("cache") / "gpu", job.tuned_seconds)
        layouts: tuple[Layout, ...] = (TEXT,) if job.sequences == 1 else (TEXT, BATCH)
        self._backend.warm_up(ALL_STEP_SIZES if job.drafts else COMMON_STEP_SIZES, layouts=layouts)

    def _load(self, job: TensorJob) -> CudaBackend:
        """Load this rank's part of the weights."""
        source = self._source
        spec = source.specification
        spec = spec.with_whole_caches() if job.whole_caches else spec
        part_spec, part_weights, part = tensor_part(spec, source.weights, job.shares, job.rank)
        self._part_of = partial(
            tensor_lora, spec=spec, whole=source.weights, part=part_weights, shares=job.shares, rank=job.rank
        )
        return CudaBackend(
            part_spec,
            part_weights,
            pool_positions(source.context, job.sequences),
            named_device(job.device),
            DeviceOptions(
                kv=job.kv,
                chunk=job.chunk,
                step_tokens=job.step_tokens,
                part=part,
                kept_states=job.kept_states,
                kept_layers=job.kept_layers,
            ),
            on_loaded=LoadProgress(source),
            collective=self._collective,
        )

    def ready(self) -> RankReady:
        """What the model's process needs to know."""
        backend = self._backend
        return RankReady(backend.capabilities, backend.state_nbytes, backend.nbytes, self._collective.kind)

    def load_head(self, job: HeadJob) -> HeadReady | None:
        """Load a draft head, if it is on this rank."""
        if job.rank != self.rank:
            return None
        self._head = RankHead(job.path, self._source, self._backend, self._chunk)
        return self._head.ready()

    def call_head(self, method: str, *arguments: Any) -> Any:
        """The result of a method of the draft head, if it is on this rank."""
        return None if self._head is None else getattr(self._head, method)(*arguments)

    def close_head(self) -> None:
        if self._head is not None:
            self._head.close()
        self._head = None

    def forward(self, ids: list[int], start: int) -> None:
        self._rows = self._backend.embed(ids)
        self._backend.forward(self._rows, start)

    def logits(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Those of some tokens of the last forward."""
        return self._backend.logits(self._rows[first : first + count])

    def final_norm(self, first: int, count: int) -> npt.NDArray[np.float32]:
        return self._backend.final_norm(self._rows[first : first + count])

    def best_ids(self, ids: list[int], start: int, parents: list[int]) -> list[int]:
        return self._backend.best_ids(ids, start, parents)

    def forward_tree(self, ids: list[int], start: int, parents: list[int]) -> None:
        self._rows = self._backend.embed(ids)
        self._backend.forward_tree(self._rows, start, parents)

    def keep_path(self, start: int, parents: list[int], rows: list[int]) -> None:
        self._backend.keep_path(start, parents, rows)

    def sample_next(
        self,
        token_id: int,
        start: int,
        request: Sequence[float] | None,
        recent: Sequence[int],
        next_request: Sequence[float] | None,
        may_run_ahead: bool,
    ) -> int:
        return self._backend.sample_next(token_id, start, request, recent, next_request, may_run_ahead)

    def set_lora(self, adapters: dict[int, LoraWeights], embedding: LoraWeights | None) -> None:
        """`adapters`: by the index of the matrix in those of the model."""
        found = {id(self._matrices[index]): weights for index, weights in adapters.items()}
        self._backend.set_lora(self._part_of(ModelLora(found, embedding)))

    def forward_batch(self, ids: list[int], positions: BatchPositions) -> None:
        self._rows = self._backend.embed(ids)
        self._backend.forward_batch(self._rows, positions)

    def sample_batch(
        self,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None,
    ) -> list[int]:
        return self._backend.sample_batch(self._rows, requests, recent, following)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self._backend.copy_pages(sources, targets)

    def read_pages(self, pages: list[int]) -> list[PageParts]:
        return self._backend.read_pages(pages)

    def write_pages(self, pages: list[int], contents: list[PageParts]) -> None:
        """`contents`: for each page the parts of every rank."""
        self._backend.write_pages(pages, [[parts[self.rank]] for parts in contents])

    def copy_positions(self, source: int, target: int, count: int) -> None:
        self._backend.copy_positions(source, target, count)

    def snapshot(self, end: int) -> StateArrays:
        return self._backend.snapshot(end)

    def restore(self, parts: list[StateArrays], end: int) -> None:
        """`parts`: the arrays of every rank."""
        self._backend.restore(parts[self.rank], end)

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        self._backend.evict(positions, end)

    def begin_profile(self) -> None:
        """Record the kernels of the first rank from now on, if it has a GPU."""
        if self.rank == 0 and self._backend.device.type == "cuda":
            self._profile = KernelProfile(self._backend.device)

    def end_profile(self) -> list[KernelRun]:
        """The kernels since `begin_profile`; empty: it isn't recording."""
        profile, self._profile = self._profile, None
        return [] if profile is None else profile.runs()


def _opened(job: TensorJob, on_progress: Callable[[int, int], None]) -> ModelSource:
    """The model's file with its weights, which are read as a part is loaded."""
    file = open_model(job.path, job.name)
    if isinstance(file, FolderFile | PowerInferFile):
        file.prepare(None)
    options = LoadOptions(context=job.context, kv=job.kv, progress=on_progress)
    return ModelSource(job.name, file, read_config(file), options)


def main() -> None:
    """Serve the pipe whose file descriptor is the argument."""
    run_rank(TensorRank)


if __name__ == "__main__":
    main()
