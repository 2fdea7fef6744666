"""How many requests run at once: the sequences whose states and caches a plan holds."""

from collections.abc import Callable
from dataclasses import replace

from edgeinfer.errors import Detail
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_offload.machine.hardware import Machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan, PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory

STATE_QUEUE = Detail(
    "requests run one at a time: the GPU would have to hold the recurrent states and caches of all of them; "
    "parallel=N takes N if they fit"
)
SPLIT_QUEUE = Detail(
    "requests run one at a time: the caches of several don't fit, or would slow a single one down by more "
    "than a tenth; parallel=N takes N if they fit"
)
WHOLE_CACHES = Detail("requests run together: layers with windows cache the whole context of each")
MIN_RATE_SHARE = 0.9
"""Minimum share of the speed of one request that the caches of several automatic ones must leave to it."""
AUTOMATIC_SEQUENCES = (4, 2)
"""Numbers of sequences that `parallel` 0 tries."""
Planner = Callable[[PlanOptions], MemoryPlan]
"""Plans a model with some options. Raises `PlanError`: it doesn't fit."""


def automatic_sequences(request: PlanRequest, options: PlanOptions, plan: Planner) -> int:
    """The number of sequences: as requested, or the largest usual one that fits."""
    if request.parallel:
        return request.parallel
    for count in AUTOMATIC_SEQUENCES:
        try:
            plan(replace(options, sequences=count))
        except PlanError:
            continue
        return count
    return 1


def gpu_options(request: PlanRequest, options: PlanOptions, plan: Planner) -> PlanOptions:
    """The options with the number of sequences on a GPU, or on the ranks of several: one, if they can't share
    the caches there, or if caches that can be shared don't fit.
    """
    shared = _shared_caches(request, options)
    if request.parallel == 1 or shared is None:
        return options
    if not shared.whole_caches:
        return replace(shared, sequences=automatic_sequences(request, shared, plan))
    for count in _counts(request):
        try:
            plan(replace(shared, sequences=count))
        except PlanError:
            continue
        return replace(shared, sequences=count)
    return options


def split_options(request: PlanRequest, machine: Machine, options: PlanOptions) -> PlanOptions:
    """As `gpu_options`, of a split model: automatic sequences leave enough of the model on the GPU. Several
    recurrent states are there only.
    """
    shared = _shared_caches(request, options)
    if request.parallel == 1 or shared is None:
        return options
    if request.parallel and not shared.whole_caches and not request.sizes.is_recurrent:
        return replace(shared, sequences=request.parallel)
    least = 0.0 if request.parallel else MIN_RATE_SHARE * _split_rate(request, machine, options)
    for count in _counts(request):
        found = replace(shared, sequences=count)
        if (rate := _split_rate(request, machine, found)) and rate >= least:
            return found
    return options


def _counts(request: PlanRequest) -> tuple[int, ...]:
    """The numbers of sequences to try."""
    return (request.parallel,) if request.parallel else AUTOMATIC_SEQUENCES


def _split_rate(request: PlanRequest, machine: Machine, options: PlanOptions) -> float:
    """Tokens/s of one request; 0: there is no such split."""
    try:
        plan = plan_memory(request.sizes, machine, options)
    except PlanError:
        return 0.0
    if (
        options.sequences > 1
        and request.sizes.is_recurrent
        and not all(layer.attention == "gpu" for layer in plan.layers)
    ):
        return 0.0  # the states of several sequences are on the GPU
    return plan.prediction.decode_tokens_per_second if plan.head == "gpu" else 0.0


def _shared_caches(request: PlanRequest, options: PlanOptions) -> PlanOptions | None:
    """The options with caches that sequences on a GPU can share, if need be without rings; None: there are
    none.
    """
    positions = pool_positions(request.context, request.parallel or AUTOMATIC_SEQUENCES[0])
    if request.sizes.has_pages(positions):
        return options
    whole = request.sizes.with_whole_caches()
    if whole.has_pages(positions):
        return replace(options, whole_caches=True)
    return None


def sequence_notes(request: PlanRequest, options: PlanOptions) -> tuple[str, ...]:
    """What the user should know about several requests on a GPU."""
    if request.parallel == 1:
        return ()
    if options.whole_caches:
        return (WHOLE_CACHES,)
    if options.sequences > 1:
        return ()
    shared = None if request.sizes.is_recurrent else _shared_caches(request, options)
    return (STATE_QUEUE if shared is None else SPLIT_QUEUE,)
