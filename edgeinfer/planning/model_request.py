"""The planner request for a model, with the hot experts from its activity profile (`edgeinfer profile`)."""

from pathlib import Path

from edgeinfer.loading.model_source import ModelSource
from edgeinfer.lora.binding import lora_sizes
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.sparse_selection import SparseSelection
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks.encoder_attention import CPU_TEXT_TOKENS, GPU_TEXT_TOKENS
from edgeinfer_kernels.sizes.cuda_buffers import CHUNK
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.system.direct_files import can_read_directly
from edgeinfer_offload.planner.plan_types import cpu_batch
from edgeinfer_offload.runtime.activity_profile import ProfileError, find_profile
from edgeinfer_offload.runtime.concentration import expert_probs


def request_for(
    source: ModelSource,
    sparse: SparseSelection | None = None,
    draft: ModelSizes | None = None,
    *,
    has_file: bool = True,
) -> PlanRequest:
    """The request for a model with its sparse layers and the sizes of its draft model. A model without a file
    has no profile.
    """
    options, is_encoder, sparse = source.options, source.config.is_encoder, sparse or SparseSelection()
    routing, warnings = known_routing(source.file.path, source.sizes) if has_file else (None, ())
    return PlanRequest(
        name=source.name,
        sizes=source.sizes,
        context=source.context,
        trained_context=source.config.trained_context,
        device=options.device.partition(":")[0],
        split=options.split,
        vram=options.vram_budgets[0],
        vram_of_each=options.vram_budgets,
        ram=options.ram,
        kv=options.kv,
        parallel=1 if is_encoder else options.parallel,
        repack=options.repack,
        streamed=has_file and can_read_directly() and len(source.file.parts) == 1,
        sparse=sparse.options,
        sparse_required=options.asks_sparse,
        bundled=sparse.on_disk.options if sparse.on_disk else None,
        bundle_error=sparse.bundle_error,
        routing=routing,
        draft=draft,
        draft_required=draft is not None and options.draft != "auto",
        lora=lora_sizes(source.adapters),
        warnings=warnings,
        batch=max(source.context, CPU_TEXT_TOKENS) if is_encoder else cpu_batch(options.kv),
        chunk=max(source.context, GPU_TEXT_TOKENS) if is_encoder else CHUNK,
    )


def known_routing(
    path: Path, sizes: ModelSizes
) -> tuple[tuple[tuple[float, ...], ...] | None, tuple[str, ...]]:
    """The usage probability of each expert, None if unknown; and warnings on an unusable profile.

    Raises OSError: the model or its profile can't be read.
    """
    if not any(layer.routed for layer in sizes.layers):
        return None, ()
    try:
        profile = find_profile(path, user_folder("data"))
    except ProfileError as error:
        return None, (f"all experts count as equally likely: {error}",)
    return (expert_probs(profile, sizes) if profile else None), ()
