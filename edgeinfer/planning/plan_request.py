"""What `load` and `edgeinfer plan` ask the planner for."""

from dataclasses import dataclass
from typing import Literal

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.lora.sizes import LoraSizes
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.plan_types import CPU_BATCH
from edgeinfer_offload.planner.sparse_types import BundledOptions, SparseOptions


@dataclass(frozen=True)
class PlanRequest:
    """A model and its load options. `device`: "cpu", "auto" or "cuda"; the machine has the available devices.

    `draft`: the sizes of its draft model. Unless `draft_required`, it is omitted if it doesn't fit or if the
    model runs on a GPU. `sparse`: for layers on the CPU; `sparse_required`: requested explicitly, so it can't
    be dropped. `parallel`: sequences whose states are held at once; 0: automatic.
    """

    name: str
    sizes: ModelSizes
    context: int
    trained_context: int
    device: str = "auto"
    split: Literal["auto", "tensor", "layers"] = "auto"
    """What each of several GPUs gets."""
    vram: int | None = None
    vram_of_each: tuple[int | None, ...] = ()
    """The budget of each GPU, if the machine has several; one of fewer is that of all."""
    ram: int | None = None
    kv: CacheType = "f16"
    repack: bool = True
    streamed: bool = False
    """Whether blocks on disk can be read ahead of a step."""
    sparse: SparseOptions | None = None
    sparse_required: bool = False
    bundled: BundledOptions | None = None
    """The sparse layers whose neurons are in a bundle file, for a model that main memory can't hold."""
    bundle_error: str = ""
    """Why its bundle file can't be used."""
    routing: tuple[tuple[float, ...], ...] | None = None
    parallel: int = 1
    draft: ModelSizes | None = None
    draft_required: bool = False
    lora: LoraSizes | None = None
    warnings: tuple[str, ...] = ()
    """Warnings for the user of a model that is split."""
    batch: int = CPU_BATCH
    """Maximum tokens of a step on the CPU."""
    chunk: int = CHUNK
    """Maximum tokens of a step on a GPU."""

    @property
    def required_draft(self) -> ModelSizes | None:
        """The draft model, if it can't be omitted."""
        return self.draft if self.draft_required else None
