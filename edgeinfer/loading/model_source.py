"""An opened model file with its config, as input of device loading, and the result of loading."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.lora.binding import Scaled
from edgeinfer.lora.reading import read_adapters
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer.model_config.weights import read_weights, rope_factors
from edgeinfer.options import LoadOptions
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_quant_formats import GGUFFile

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True)
class ModelSource:
    """The file, its config, and the options."""

    name: str
    file: GGUFFile
    config: ModelConfig
    options: LoadOptions
    known_sizes: ModelSizes | None = None
    """Its sizes if they are counted already."""

    @property
    def context(self) -> int:
        """Context in tokens: as requested, else the trained context, 4096 at most; an encoder's isn't longer
        than the trained one. Raises `SettingError`: there are no learned positions for it.
        """
        trained = self.config.trained_context
        requested = self.options.context or min(trained, DEFAULT_CONTEXT)
        if self.config.has_positions and requested > trained:
            raise SettingError(
                f"context: saw {requested}, but {self.name} has learned positions for {trained} tokens only; "
                f"take at most {trained}"
            )
        return min(requested, trained) if self.config.is_encoder else requested

    @cached_property
    def factors(self) -> Factors | None:
        """The divisors of the RoPE frequencies."""
        return rope_factors(self.file, self.config, self.context)

    @cached_property
    def specification(self) -> DecoderSpec:
        return self.config.specification(self.factors)

    @cached_property
    def sizes(self) -> ModelSizes:
        return self.known_sizes or ModelSizes.of(self.specification, self.weights)

    @cached_property
    def weights(self) -> DecoderWeights:
        return read_weights(self.file, self.config)

    @cached_property
    def adapters(self) -> list[Scaled]:
        """The LoRA adapters of the options, with their scales. Raises `AdapterError`."""
        return read_adapters(self.options.lora, self.config)


@dataclass(frozen=True)
class PartSource(ModelSource):
    """Some layers of a model, as a model. `part`: their specification and weights."""

    part: tuple[DecoderSpec, DecoderWeights] | None = None

    @classmethod
    def of(cls, source: ModelSource, part: tuple[DecoderSpec, DecoderWeights]) -> "PartSource":
        """A part of `source`."""
        return cls(source.name, source.file, source.config, source.options, part=part)

    @cached_property
    def specification(self) -> DecoderSpec:
        assert self.part is not None
        return self.part[0]

    @cached_property
    def weights(self) -> DecoderWeights:
        assert self.part is not None
        return self.part[1]


def planned_specification(source: ModelSource, plan: MemoryPlan) -> DecoderSpec:
    """The decoder with the caches of a plan."""
    spec = source.specification
    return spec.with_whole_caches() if plan.options.whole_caches else spec


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with the plan that it executes, and warnings for the user."""

    engine: NativeEngine
    placed: MemoryPlan
    plan: Callable[[], MemoryPlan]
    """Returns the plan with all speeds, which are measured on first use."""
    gpu: Gpu | None = None
    """The GPU that it uses, if any."""
    thread_pool: ThreadPool | None = None
    """The thread pool of an engine that is wholly on the CPU; a draft model shares it."""
    warnings: list[str] = field(default_factory=list)

    @property
    def threads(self) -> int:
        """CPU threads for it or its draft model."""
        return self.placed.machine.processor.threads


class LoadProgress:
    """Counts the bytes loaded into the kernels' layout, and releases the file's pages after use.

    `left`: bytes that stay memory-mapped.
    """

    def __init__(self, source: ModelSource, left: int = 0) -> None:
        self._file = source.file
        self._progress = source.options.progress
        matrices = source.weights.matrices(head=not source.specification.is_encoder)
        self._total = sum(matrix.nbytes for matrix in matrices) - left
        self._done = 0
        self.released = False

    def __call__(self, matrix: Matrix) -> None:
        self._file.check_size()
        if matrix.name in self._file.tensors:  # a predictor's matrices aren't in this file
            self.released = self._file.release(matrix.name)
        self._done = min(self._done + matrix.nbytes, self._total)
        if self._progress:
            self._progress(self._done, self._total)
