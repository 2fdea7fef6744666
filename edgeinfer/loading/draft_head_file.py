"""The draft head of a model: found in its file or a separate one, counted for the plan, and loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from edgeinfer.errors import EdgeInferError, SettingError, UnsupportedModelError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.layers.assistant_head import is_assistant_file, read_assistant_head
from edgeinfer.model_config.layers.block_drafts import (
    BlockDraftModel,
    is_block_file,
    read_block_drafts,
)
from edgeinfer.model_config.layers.draft_head import DraftHeadModel, head_count, read_draft_head
from edgeinfer.model_config.layers.eagle_head import is_eagle_file, read_eagle_head
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer.model_config.weights import is_head_file, read_weights
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.speculation.heads.assistant import Assistant
from edgeinfer.speculation.heads.block_drafter import BlockDrafter
from edgeinfer.speculation.heads.device_assistant import DeviceAssistant
from edgeinfer.speculation.heads.device_block_drafter import DeviceBlockDrafter
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer.speculation.heads.draft_head import DraftHead
from edgeinfer.speculation.heads.several_heads import SeveralHeads
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend, CpuOptions
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import load_kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_units, row_units
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.decoder import DecoderWeights
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.sizes.cpu_workspace import observed_bytes, workspace_bytes
from edgeinfer_kernels.sizes.cuda_buffers import kept_state_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_quant_formats import GGUFFile


@dataclass(frozen=True)
class HeadFile:
    """An open draft head; `required`: it was requested by name. `own_file`: whether its file has only the
    head, and is closed with it.
    """

    name: str
    file: GGUFFile
    sizes: ModelSizes
    required: bool
    own_file: bool

    @classmethod
    def of(cls, file: GGUFFile, target: GGUFFile, config: ModelConfig, *, required: bool) -> Self:
        """The head in `file`, for a target with this config.

        Raises:
            SettingError: there is none, or it can't be run.
        """
        own_file = file is not target
        try:
            tables = read_weights(target, config, shapes_only=True)
            heads = _read_heads(file, config, tables, shapes_only=True)
            first, *others = [head.sizes for head in heads]
        except UnsupportedModelError as error:
            raise SettingError(f"draft: {f'{file.path.name}: ' if own_file else ''}{error}") from error
        name = file.path.stem if own_file else "draft head"
        sizes = replace(first, further_heads=tuple(others))
        return cls(name, file, sizes, required, own_file)

    def close(self) -> None:
        if self.own_file:
            self.file.close()

    def load(self, source: ModelSource, target: LoadedEngine) -> DraftHead | Assistant | DeviceAssistant:
        """The head on the device of its target, whose matrices it shares.

        Raises:
            SettingError: it can't run there, or other programs took the memory that the plan has for it.
        """
        try:
            heads = self.heads(source)
        except UnsupportedModelError as error:
            raise SettingError(f"draft: {self.name}: {error}") from error
        if target.gpu is not None:
            return self._on_gpu(heads, source, target)
        loaded = [self._on_cpu(head, source, target) for head in heads]
        nbytes = sum(map(self._nbytes, heads, loaded, len(heads) * [target]))
        if heads[0].target_caches:
            table, scale = source.weights.token_embd, target.engine.specification.embedding_scale
            return Assistant(
                loaded[0],
                target.engine,
                lambda token: np.asarray(table.decoded_rows(np.array([token])) * scale, np.float32),
                nbytes,
                self.close,
            )
        width = 1 + source.options.draft_tree_width
        if isinstance(heads[0], BlockDraftModel):
            return BlockDrafter(loaded, target.engine, heads[0], nbytes, self.close, tree_width=width)
        if len(heads) > 1:
            return SeveralHeads(loaded, target.engine, heads[0], nbytes, self.close)
        return DraftHead(loaded[0], target.engine, heads[0], nbytes, self.close, tree_width=width)

    def heads(self, source: ModelSource) -> list[DraftHeadModel]:
        """All heads of the file, for a target. Raises `UnsupportedModelError`."""
        return _read_heads(self.file, source.config, source.weights, source.context, source.factors)

    def _on_gpu(
        self, heads: list[DraftHeadModel], source: ModelSource, target: LoadedEngine
    ) -> DraftHead | DeviceAssistant:
        from edgeinfer.loading.gpu_loading import load_gpu_assistant, load_gpu_heads, warm_up_drafts
        from edgeinfer.loading.tensor.loading import load_tensor_head
        from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError

        assert target.gpu is not None
        kept = kept_state_bytes(heads[0].sizes)
        try:
            if heads[0].target_caches:
                assistant = load_gpu_assistant(heads[0], source, target)
                return DeviceAssistant(assistant, target.engine, assistant.nbytes + kept, self.close)
            is_tensor = isinstance(target.placed, TensorPlan)
            loaded: Any = (
                load_tensor_head(self.file.origin if self.own_file else None, target)
                if is_tensor
                else load_gpu_heads(heads, source, target)
            )
            given = loaded.nbytes + kept, self.close, loaded.batch, 1 + source.options.draft_tree_width
            if isinstance(heads[0], BlockDraftModel):
                return DeviceBlockDrafter(loaded, target.engine, heads[0], *given)
            head = DeviceHead(loaded, target.engine, heads[0], *given)
            if not is_tensor:
                warm_up_drafts(loaded, target.gpu, trees=head.tree_width > 1)
        except (GpuUnavailableError, DeviceMemoryError) as error:
            raise SettingError(f"draft: {self.name}: {error}") from error
        return head

    def _on_cpu(self, head: DraftHeadModel, source: ModelSource, target: LoadedEngine) -> CpuBackend:
        """A head on the threads of its target."""
        options, backend = source.options, target.engine.backend
        assert isinstance(backend, CpuBackend)
        kernels = load_kernels(
            user_folder("cache"),
            choose(options.instruction_set),
            _kernel_units(head),
            options.build_progress,
        )
        shares = not head.own_output and any(m is source.weights.output for m in backend.decoder.repacked)
        output = head.weights.output
        in_file = [] if shares or head.own_output else [output]
        return CpuBackend(
            head.spec,
            head.weights,
            _state(head, source, backend.state),
            kernels,
            CpuOptions(
                head.sizes.draft_batch,
                in_file=in_file if options.repack else head.weights.matrices(),
                packed={id(output): backend.decoder.packed[id(source.weights.output)]} if shares else {},
            ),
            pool=target.thread_pool,
        )

    @staticmethod
    def _nbytes(head: DraftHeadModel, loaded: CpuBackend, target: LoadedEngine) -> int:
        """Bytes of a head on the CPU, as the plan counts them."""
        repack = target.placed.options.repack
        buffers = workspace_bytes(head.sizes, head.sizes.draft_batch, loaded.pool.threads, repack)
        observed = observed_bytes(head.sizes, target.engine.batch)
        caches = 0 if head.target_caches else loaded.state_nbytes
        return loaded.repacked_bytes + caches + buffers + observed


def _read_heads(
    file: GGUFFile,
    config: ModelConfig,
    tables: DecoderWeights,
    context: int = 0,
    factors: Factors | None = None,
    *,
    shapes_only: bool = False,
) -> list[DraftHeadModel]:
    """The decoders of a file's draft heads; `factors`: those of the target."""
    if is_block_file(file):
        block = read_block_drafts(file, config, tables, context, shapes_only=shapes_only)
        return [block] if block.markov is None else [block, block.markov]
    if is_eagle_file(file):
        return [read_eagle_head(file, config, tables, context, shapes_only=shapes_only)]
    if is_assistant_file(file):
        return [read_assistant_head(file, config, tables, context, shapes_only=shapes_only)]
    return [
        read_draft_head(file, config, tables, factors, head=head, shapes_only=shapes_only)
        for head in range(max(1, head_count(file, config)))
    ]


def _state(head: DraftHeadModel, source: ModelSource, target: DecoderState) -> DecoderState:
    """The KV cache of a head, or those of its target that it reads."""
    if not head.target_caches:
        return head.allocate_state(source.context, source.options.kv)
    found = {own: target.get(index) for own, index in head.target_caches.items()}
    return DecoderState({own: state for own, state in found.items() if state}, recent=target.recent)


def _kernel_units(head: DraftHeadModel) -> list[str]:
    """The units of its kernels, and that of its embedding, so that the draft loop runs."""
    table = head.weights.token_embd.format
    of_table = row_units([table]) if table in FIELDS else []
    return list(dict.fromkeys([*kernel_units(head.weights), *of_table]))


def is_head_path(path: Path) -> bool:
    """Whether a file has only a draft head; False too if it can't be read."""
    try:
        file = open_file(path)
    except (OSError, ValueError, EdgeInferError):
        return False
    try:
        return is_head_file(file)
    finally:
        file.close()
