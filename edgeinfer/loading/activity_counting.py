"""Counts the activity of models for which sparse layers may pay, as long as they are loaded."""

from collections.abc import Callable

from edgeinfer.loading.model_source import LoadedEngine, ModelSource
from edgeinfer.profiling.activity_counts import ActivityCounts
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.sparse import experts_of, why_dense
from edgeinfer_offload.runtime.split_backend import SplitBackend

MIN_BYTES = 256 << 20
"""Files from which on activity is counted: sparse layers don't make small models faster."""


def begin_counting(source: ModelSource, loaded: LoadedEngine) -> ActivityCounts | None:
    """Count from now on; None: not wanted, or the model has no neurons that are exactly zero."""
    if not source.options.count_activity or source.sizes.nbytes < MIN_BYTES:
        return None
    spec = source.specification
    able = [layer for layer in range(len(spec.layers)) if why_dense(spec, source.weights, layer) is None]
    experts = {layer: experts_of(source.weights, layer) for layer in able}
    if isinstance(loaded.engine.backend, SplitBackend):  # a GPU reports the rows of dense layers only
        experts = {layer: count for layer, count in experts.items() if not count}
    if not experts:
        return None
    counts = ActivityCounts(source.file.path, experts, user_folder("data"))
    for engine in (loaded.engine, *loaded.engine.others):
        backend = engine.backend
        if isinstance(backend, CpuBackend):
            backend.on_hidden = counts.observe
        elif isinstance(backend, SplitBackend):
            backend.gpu_shard.observe(counts.observe)
    return counts


def closing(close_file: Callable[[], None], counts: ActivityCounts | None) -> Callable[[], None]:
    """What closes a model's file, after its counts are saved."""
    if counts is None:
        return close_file

    def close() -> None:
        counts.save()
        close_file()

    return close
