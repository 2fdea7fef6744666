"""Medusa heads: a file or a folder of the published layout, counted for the plan, and loaded."""

from dataclasses import dataclass
from typing import Self

from edgeinfer.errors import SettingError, UnsupportedModelError
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.layers.medusa_heads import MedusaModel, read_medusa
from edgeinfer.model_config.weights import read_weights
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.speculation.heads.device_medusa import DeviceMedusa
from edgeinfer.speculation.heads.medusa_heads import MedusaHeads
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.sizes.cpu_workspace import workspace_bytes
from edgeinfer_kernels.sizes.cuda_buffers import kept_state_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_quant_formats import GGUFFile


@dataclass(frozen=True)
class MedusaFile:
    """Open Medusa heads; `required`: as for `HeadFile`."""

    name: str
    file: GGUFFile
    sizes: ModelSizes
    required: bool

    @classmethod
    def of(cls, file: GGUFFile, target: GGUFFile, config: ModelConfig) -> Self:
        """The heads in `file`, for a target with this config. Raises `SettingError`: they can't be run."""
        try:
            tables = read_weights(target, config, shapes_only=True)
            heads = read_medusa(file, config, tables, shapes_only=True)
        except UnsupportedModelError as error:
            raise SettingError(f"draft: {error}") from error
        return cls(file.origin.stem, file, heads.sizes, True)

    def close(self) -> None:
        self.file.close()

    def load(self, source: ModelSource, target: LoadedEngine) -> MedusaHeads | DeviceMedusa:
        """The heads on the device of their target.

        Raises:
            SettingError: a damaged tensor, or other programs took the memory that the plan has for the heads.
        """
        try:
            heads = read_medusa(self.file, source.config, source.weights)
        except UnsupportedModelError as error:
            raise SettingError(f"draft: {self.name}: {error}") from error
        if target.gpu is not None:
            return self._on_gpu(heads, source, target)
        backend = self._backend(heads, source, target)
        options, batch = source.options, heads.sizes.draft_batch
        buffers = workspace_bytes(heads.sizes, batch, backend.pool.threads, options.repack)
        return MedusaHeads(
            backend,
            target.engine,
            backend.repacked_bytes + buffers,
            len(heads.spec.layers),
            heads.spec.vocabulary_size,
            1 + options.draft_tree_width,
            self.close,
        )

    def _on_gpu(self, heads: MedusaModel, source: ModelSource, target: LoadedEngine) -> DeviceMedusa:
        from edgeinfer.loading.gpu_loading import load_gpu_medusa
        from edgeinfer.loading.tensor.loading import load_tensor_head
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        try:
            loaded = (
                load_tensor_head(self.file.origin, target)
                if isinstance(target.placed, TensorPlan)
                else load_gpu_medusa(heads, source, target)
            )
        except (GpuUnavailableError, DeviceMemoryError) as error:
            raise SettingError(f"draft: {self.name}: {error}") from error
        nbytes, width = loaded.nbytes + kept_state_bytes(heads.sizes), 1 + source.options.draft_tree_width
        return DeviceMedusa(loaded, target.engine, nbytes, width, self.close)

    @staticmethod
    def _backend(heads: MedusaModel, source: ModelSource, target: LoadedEngine) -> CpuBackend:
        options, weights = source.options, heads.weights
        units = kernel_units(weights, head=False)
        kernels = load_kernels(
            user_folder("cache"), choose(options.instruction_set), units, options.build_progress
        )
        in_file = () if options.repack else weights.matrices(head=False)
        state = DecoderState.allocate(heads.spec, source.context, options.kv)
        loaded = CpuOptions(heads.sizes.draft_batch, in_file=in_file, head=False)
        return CpuBackend(heads.spec, weights, state, kernels, loaded, pool=target.thread_pool)
