"""A model file that has been read as far as every device needs it, and what loading it there gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.load_options import LoadOptions
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.weights import read_weights, rope_factors
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights, Matrix
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import Place
from edgeinfer_quant_formats import GGUFFile

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class ModelSource:
    """The file, its configuration, and the wishes for it."""

    name: str
    file: GGUFFile
    config: ModelConfig
    wishes: LoadOptions

    @property
    def context(self) -> int:
        """Tokens of the cache: as wished, else what the model was trained for, 4096 at most."""
        return self.wishes.context or min(self.config.trained_context, DEFAULT_CONTEXT)

    @cached_property
    def specification(self) -> DecoderSpecification:
        return self.config.specification(rope_factors(self.file, self.config, self.context))

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.specification, self.weights)

    @cached_property
    def weights(self) -> DecoderWeights:
        return read_weights(self.file, self.config)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with its plan, and what the user should know of how it came about."""

    engine: NativeEngine
    plan: Callable[[], MemoryPlan]
    """With how fast everything is read, which is measured on first use."""
    draft: Place | None = None
    """Where its plan has room for the draft model; None: nowhere."""
    whole_on_gpu: bool = False
    """Whether all of it is on a GPU."""
    threads: int = 1
    """Of the CPU, for it or its draft model."""
    gpu: Gpu | None = None
    """The GPU that any of it is on."""
    draft_gpu_bytes: int = 0
    """What the plan keeps there for the draft model, with what all models there share."""
    notes: list[str] = field(default_factory=list)
    team: ThreadPool | None = None
    """The threads of an engine that lies on the CPU as a whole; a draft model's take turns with them."""


class LoadProgress:
    """Counts the bytes that have come where the kernels want them; lets go of the file's pages behind.

    `left`: bytes that stay in the file.
    """

    def __init__(self, source: ModelSource, left: int = 0) -> None:
        self._file = source.file
        self._progress = source.wishes.progress
        self._total = sum(matrix.nbytes for matrix in source.weights.matrices()) - left
        self._done = 0
        self.released = False

    def __call__(self, matrix: Matrix) -> None:
        self._file.check_size()
        if matrix.name in self._file.tensors:  # a predictor's matrices come from elsewhere
            self.released = self._file.release(matrix.name)
        self._done = min(self._done + matrix.nbytes, self._total)
        if self._progress:
            self._progress(self._done, self._total)
