"""One decision for every device: all on the GPU, split, or all on the CPU; and the gain of more memory."""

from dataclasses import replace

import pytest

from edgeinfer.errors import OutOfMemoryError
from edgeinfer.planning.device_plan import plan_devices, with_one_gib_more
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer.planning.parallel_sequences import MIN_RATE_SHARE, SPLIT_QUEUE, WHOLE_CACHES
from edgeinfer.planning.plan_request import PlanRequest
from edgeinfer.planning.several_gpus import SEVERAL_QUEUE
from edgeinfer_kernels.blocks.attention import AttentionSizes
from edgeinfer_kernels.blocks.embedding.draft_input import DraftInputSizes
from edgeinfer_kernels.lora.sizes import LoraSizes
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.machine.description import describe_machine
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.several_gpus.pipeline_plan import PipelinePlan
from edgeinfer_offload.planner.several_gpus.tensor_plan import TensorPlan
from edgeinfer_offload.planner.sparse_types import SparseLayer, SparseOptions
from tests.offload.model_shapes import GIB, cpu_only, dense_model, laptop, mixed_model

SMALL = dense_model(4, 1024, 4096, vocabulary=32000)


def request(sizes: ModelSizes | None = None, **options: object) -> PlanRequest:
    plan_request = PlanRequest("m", sizes or dense_model(), context=8192, trained_context=1 << 17)
    return replace(plan_request, **options)  # type: ignore[arg-type]


def test_a_model_that_fits_the_gpu_is_there_entirely_otherwise_split() -> None:
    assert plan_devices(request(), laptop()).memory.device == "gpu"
    assert plan_devices(request(vram=3 * GIB), laptop()).memory.device is None
    assert plan_devices(request(), cpu_only()).memory.device == "cpu"
    assert plan_devices(request(device="cpu"), laptop()).memory.device == "cpu"
    nothing = plan_devices(request(vram=0), laptop())
    assert nothing.memory.device == "cpu"
    assert nothing.memory.limit_reason is not None
    assert "nothing is on the GPU: its buffers and libraries alone take" in nothing.memory.limit_reason
    with pytest.raises(GpuUnavailableError, match="nothing is on the GPU"):
        plan_devices(request(device="cuda", vram=0), laptop())


def test_a_cache_in_f32_is_on_the_cpu() -> None:
    planned = plan_devices(request(kv="f32"), laptop()).memory
    assert planned.device == "cpu"
    assert planned.limit_reason is not None
    assert "kv: f32 runs on the CPU only" in planned.limit_reason
    with pytest.raises(GpuUnavailableError, match="kv: f32 runs on the CPU only; take f16, fp8"):
        plan_devices(request(kv="f32", device="cuda"), laptop())


def test_a_gpu_has_recent_positions_and_a_split_model_short_steps_with_them() -> None:
    few, recent = (plan_devices(request(kv=kv), laptop()).memory for kv in ("q4_0", "q4_0+f16"))
    assert few.device == recent.device == "gpu"
    layers, rows = len(dense_model().layers), 40 * 16
    spec = next(block.spec for block in dense_model().blocks if isinstance(block, AttentionSizes))
    in_f16 = layers * 2 * spec.kv_heads * spec.head_dim * rows * 2
    assert recent.nbytes - few.nbytes == pytest.approx(in_f16, abs=1 << 16)
    split = plan_devices(request(kv="q4_0+f16", vram=3 * GIB), laptop()).memory
    assert split.device is None
    assert split.options.batch == split.options.chunk == 64
    assert split.prediction.stream_min_tokens is None


@pytest.mark.parametrize(("share", "is_sparse"), [(0.3, True), (0.99, False)])
def test_sparse_layers_next_to_a_gpu_are_planned_if_they_are_faster(share: float, is_sparse: bool) -> None:
    held = sum(matrix.nbytes for matrix in list(dense_model().layers[0].matrices())[-3:])
    layer = SparseLayer(held, round(share * held), 0, 0, held)
    sparse = SparseOptions(dict.fromkeys(range(len(dense_model().layers)), layer), 0, 0)
    automatic = plan_devices(request(vram=3 * GIB, sparse=sparse), laptop()).memory
    assert (automatic.options.sparse is not None) == is_sparse
    requested = plan_devices(request(vram=3 * GIB, sparse=sparse, sparse_required=True), laptop()).memory
    assert requested.options.sparse == sparse
    dense = plan_devices(request(vram=3 * GIB), laptop()).memory
    assert automatic.ms_per_token <= dense.ms_per_token


def test_speeds_are_measured_only_for_a_split_model() -> None:
    def measured(machine: object) -> None:
        raise AssertionError("measured")

    assert plan_devices(request(), laptop(), measured).memory.device == "gpu"  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        plan_devices(request(vram=3 * GIB), laptop(), measured)  # type: ignore[arg-type]


def test_a_draft_model_is_on_the_gpu_if_it_fits_otherwise_on_the_cpu() -> None:
    drafting = request(draft=SMALL, draft_required=True)
    whole = plan_devices(drafting, laptop())
    assert (whole.memory.device, whole.memory.draft) == ("gpu", "gpu")
    alone = plan_devices(request(), laptop()).memory.bytes_on("gpu")
    tight = plan_devices(replace(drafting, vram=alone + 1000), laptop())
    assert (tight.memory.device, tight.memory.draft) == ("gpu", "cpu")
    assert plan_devices(request(draft=SMALL), laptop()).memory.draft is None
    assert plan_devices(request(draft=SMALL), cpu_only()).memory.draft == "cpu"


def test_a_draft_model_without_memory_is_omitted_or_refused() -> None:
    plain = plan_devices(request(), cpu_only()).memory.bytes_on("cpu")
    optional = plan_devices(request(draft=SMALL, ram=plain + 1000), cpu_only())
    assert optional.memory.draft is None
    assert optional.warnings == ("not enough memory for the draft model; using prompt lookup instead",)
    with pytest.raises(OutOfMemoryError, match="context="):
        plan_devices(request(draft=SMALL, draft_required=True, ram=plain + 1000), cpu_only())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("vram", [1, 2, 3])
@pytest.mark.parametrize("ram", [None, 2 * GIB])
def test_advice_gives_the_speed_with_one_more_gibibyte(vram: int, ram: int | None) -> None:
    for sizes in (dense_model(), mixed_model()):
        plan_request = request(sizes, vram=vram * GIB, ram=ram, context=256)  # some of it is memory-mapped
        planned = plan_devices(plan_request, laptop())
        more = plan_devices(replace(plan_request, vram=(vram + 1) * GIB), laptop())
        advised = with_one_gib_more(plan_request, laptop(), planned).rate_with_one_gib_more
        assert advised == more.memory.prediction.decode_tokens_per_second
    whole = plan_devices(request(), laptop())
    assert with_one_gib_more(request(), laptop(), whole).rate_with_one_gib_more is None


def test_a_split_model_holds_the_requested_sequences() -> None:
    split = plan_devices(request(vram=3 * GIB, parallel=4), laptop())
    assert (split.memory.device, split.memory.options.sequences, split.warnings) == (None, 4, ())
    single = plan_devices(request(vram=3 * GIB), laptop())
    assert split.memory.cache_bytes == pytest.approx(4 * single.memory.cache_bytes, rel=0.01)
    assert split.memory.bytes_on("gpu") <= 3 * GIB


@pytest.mark.parametrize(("context", "sequences"), [(512, 4), (8192, 2)])
def test_automatic_sequences_leave_the_speed_of_one_to_a_split_model(context: int, sequences: int) -> None:
    one, several, four = (
        plan_devices(request(vram=3 * GIB, context=context, parallel=parallel), laptop()).memory
        for parallel in (1, 0, 4)
    )
    assert several.options.sequences == sequences
    wanted = MIN_RATE_SHARE * one.prediction.decode_tokens_per_second
    assert several.prediction.decode_tokens_per_second >= wanted
    assert (four.prediction.decode_tokens_per_second >= wanted) == (sequences == 4)


def with_rings() -> ModelSizes:
    """A model with windows whose caches are rings."""
    sizes = dense_model(window=512)
    attention = sizes.layers[0].blocks[0]
    assert isinstance(attention, AttentionSizes)
    rings = replace(attention, spec=replace(attention.spec, ring=1296))
    return replace(sizes, layers=tuple(LayerSizes((rings, *layer.blocks[1:])) for layer in sizes.layers))


@pytest.mark.parametrize("vram", [8, 3])
def test_several_requests_on_a_gpu_share_whole_caches_of_windows(vram: int) -> None:
    several = plan_devices(request(with_rings(), context=4096, vram=vram * GIB, parallel=2), laptop())
    options = several.memory.options
    assert (options.sequences, options.whole_caches, several.warnings) == (2, True, (WHOLE_CACHES,))
    whole = plan_devices(request(dense_model(), context=4096, vram=vram * GIB, parallel=2), laptop())
    assert several.memory.cache_bytes == pytest.approx(whole.memory.cache_bytes, rel=0.01)
    one = plan_devices(request(with_rings(), context=4096, vram=vram * GIB), laptop())
    assert (one.memory.options.whole_caches, one.warnings) == (False, ())
    assert one.memory.cache_bytes < several.memory.cache_bytes / 4


def test_a_plan_says_where_several_requests_run_one_at_a_time() -> None:
    planned = plan_devices(request(with_rings(), context=1 << 16, parallel=4, ram=6 * GIB), laptop())
    options = planned.memory.options
    assert (options.sequences, options.whole_caches, planned.warnings) == (1, False, (SPLIT_QUEUE,))


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    ("cards", "split", "gib", "kind"),
    [
        ("2x rtx 3090", "auto", None, TensorPlan),
        ("2x rtx 3090", "layers", 4, PipelinePlan),
        ("2x rtx 3090", "tensor", 5, TensorPlan),
        ("2x rtx 3090", "layers", None, MemoryPlan),
        ("rtx 3090", "tensor", None, MemoryPlan),
    ],
)
def test_the_kind_of_split_over_several_gpus_is_the_faster_or_the_requested_one(
    cards: str, split: str, gib: int | None, kind: type[MemoryPlan]
) -> None:
    budgets = () if gib is None else (gib * GIB,)
    planned = plan_devices(request(split=split, vram_of_each=budgets), describe_machine(cards))
    assert type(planned.memory) is kind


def test_a_small_model_on_a_slow_link_is_on_one_gpu_unless_tensor_parallel_is_requested() -> None:
    here = describe_machine("2x rtx 3090")
    assert type(plan_devices(request(SMALL), here).memory) is MemoryPlan
    planned = plan_devices(request(SMALL, split="tensor"), here)
    assert type(planned.memory) is TensorPlan
    assert "8 sums of 25 µs (PCIe)" in str(planned.memory.limit_reason)


@pytest.mark.parametrize("split", ["auto", "tensor"])
def test_several_requests_share_the_caches_of_one_gpu_or_of_all_ranks(split: str) -> None:
    several = plan_devices(request(SMALL, split=split, parallel=4), describe_machine("2x rtx 3090"))
    assert several.memory.options.sequences == 4
    assert SEVERAL_QUEUE not in several.warnings


@pytest.mark.slow
def test_consecutive_layers_take_one_request_at_a_time_and_neither_adapters_nor_drafts() -> None:
    here = describe_machine("2x rtx 3090")
    by_layers = request(split="layers", vram_of_each=(4 * GIB,), parallel=4)
    planned = plan_devices(by_layers, here)
    assert type(planned.memory) is PipelinePlan
    assert planned.warnings == (SEVERAL_QUEUE,)
    for given, name in (
        ({"lora": LoraSizes()}, "adapters"),
        ({"draft": SMALL, "draft_required": True}, "draft"),
    ):
        refused = replace(by_layers, device="cuda", **given)
        with pytest.raises(GpuUnavailableError, match=f"take no {name}.*; take split='tensor'"):
            plan_devices(refused, here)
        planned = plan_devices(replace(refused, split="auto", vram_of_each=(6 * GIB,)), here)
        assert type(planned.memory) is TensorPlan


def head_of(sizes: ModelSizes) -> ModelSizes:
    """A draft head for a model of these sizes: one of its layers after the draft input."""
    width = sizes.hidden_size
    pair = DraftInputSizes(MatrixSize("eh_proj", sizes.head.format, width, 2 * width))
    layers = (LayerSizes((pair, *sizes.layers[0].blocks)),)
    return replace(sizes, layers=layers, shares_head=True, shares_embedding=sizes.embedding is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "gib"), [("tensor", 6), ("layers", 5)])
def test_a_draft_head_is_on_one_rank_or_on_the_gpu_of_the_last_layers(split: str, gib: int) -> None:
    here, sizes = describe_machine("2x rtx 3090"), dense_model()
    with_head = request(sizes, split=split, vram_of_each=(gib * GIB, 5 * GIB), draft=head_of(sizes))
    planned = plan_devices(replace(with_head, draft_required=True), here).memory
    (item,) = (item for item in planned.items if item.item == "draft head")
    assert planned.has_gpu_head
    assert planned.draft == item.device
    assert item.device == ("gpu1" if split == "layers" else planned.draft)
    assert isinstance(planned, TensorPlan | PipelinePlan)
    owners = [part.has_gpu_head for part in planned.parts]
    assert owners.index(True) == ("gpu", "gpu1").index(item.device)
    assert sum(owners) == 1
    automatic = plan_devices(with_head, here).memory
    assert automatic.draft is None


def test_the_first_of_several_heads_has_a_copy_of_what_its_gpu_lacks() -> None:
    sizes = dense_model()
    heads = replace(head_of(sizes), further_heads=(head_of(sizes),))
    assert heads.shares_embedding
    ranked, split = heads.as_head_of_ranks(sizes), heads.as_head_of_split(sizes)
    assert [each.shares_head for each in (ranked, *ranked.further_heads)] == [False, True]
    assert [each.shares_embedding for each in (split, *split.further_heads)] == [False, True]
    own = replace(heads, shares_head=False).as_head_of_ranks(sizes)
    assert [each.shares_head for each in own.further_heads] == [False]
    tied = replace(sizes, embedding=None)
    assert heads.as_head_of_ranks(tied) == heads
