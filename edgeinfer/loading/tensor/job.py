"""What a rank of tensor parallel loads. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK, MAX_TOKENS
from edgeinfer_kernels.tensor_parts import Sums


@dataclass(frozen=True)
class TensorJob:
    """The part of a model's file that a rank loads.

    `shares`: of all ranks; `device`: that of this one, as torch names it; `store`: the file by which the
    ranks find each other. `sequences`: that share the caches. `tuned_seconds`: time limit for tuning; 0: it
    isn't tuned. `drafts`: steps of any number of tokens are compiled.
    """

    path: Path
    name: str
    context: int
    rank: int
    shares: tuple[float, ...]
    device: str
    store: str
    sequences: int = 1
    kv: CacheType = "f16"
    chunk: int = CHUNK
    step_tokens: int = MAX_TOKENS
    whole_caches: bool = False
    drafts: bool = False
    tuned_seconds: float = 0.0
    sums: Sums = "auto"
    kept_states: int = 0
    kept_layers: tuple[int, ...] = ()
    """As in `DeviceOptions`, on the rank that has a draft head."""


@dataclass(frozen=True)
class HeadJob:
    """The draft head that a rank loads after its part. `path`: of its file, None: that of the model."""

    rank: int
    path: Path | None
