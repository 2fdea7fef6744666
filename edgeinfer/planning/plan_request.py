"""Builds the planner request for a model that is about to be loaded."""

from edgeinfer.loading.model_source import ModelSource
from edgeinfer.planning.device_plan import PlanRequest
from edgeinfer.planning.known_routing import known_routing
from edgeinfer.planning.sparse_choice import SparseChoice
from edgeinfer_kernels.sizes.model_sizes import ModelSizes


def request_for(source: ModelSource, sparse: SparseChoice, draft: ModelSizes | None) -> PlanRequest:
    """The request for a model with its sparse layers and the sizes of its draft model."""
    wishes = source.wishes
    return PlanRequest(
        name=source.name,
        sizes=source.sizes,
        context=source.context,
        trained_context=source.config.trained_context,
        device=wishes.device.partition(":")[0],
        vram=wishes.vram,
        ram=wishes.ram,
        kv=wishes.kv,
        repack=wishes.repack,
        sparse=sparse.wish,
        sparse_required=wishes.asks_sparse,
        routing=known_routing(source.file.path, source.sizes)[0],
        draft=draft,
        draft_required=draft is not None and wishes.draft != "auto",
    )
