"""Bytes of the KV cache of models with windows: those of docs/internals/ring-caches.md."""

import re
from pathlib import Path

import pytest

from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer_kernels.blocks.attention import AttentionSizes, AttentionSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import SPARE_POSITIONS
from edgeinfer_kernels.caches.ring_cache import RING_SPARE, RING_STEP
from edgeinfer_kernels.decoder import DecoderSpec
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_offload.planner.memory_plan import MemoryPlan
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import plan_memory
from tests.offload.model_shapes import GIB, MIB, cpu_only, feed_forward, server
from tests.random_models import VOCABULARY, RandomModel
from tests.zoo.ring_layers import with_rings

PAGE = Path(__file__).parents[3] / "docs" / "internals" / "ring-caches.md"
WINDOW = "attention.sliding_window"
MODELS = {
    "gemma-3-27b": RandomModel(
        "gemma3", width=5376, layers=62, heads=32, kv_heads=16, head_dim=128, extra={WINDOW: 1024}
    ),
    "gemma-3-4b": RandomModel(
        "gemma3", width=2560, layers=34, heads=8, kv_heads=4, head_dim=256, extra={WINDOW: 1024}
    ),
    "gpt-oss-20b": RandomModel(
        "gpt-oss",
        width=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        experts=32,
        experts_per_token=4,
        extra={WINDOW: 128},
    ),
}
CONTEXTS = (4096, 32768, 131072)


def spec_of(name: str) -> DecoderSpec:
    return config_from_metadata(MODELS[name].metadata(), VOCABULARY).specification()


def formula(spec: DecoderSpec, context: int, bytes_of_head: int) -> int:
    """Bytes of keys and values whose heads take `bytes_of_head` each."""
    nbytes = 0
    for block in spec.specs(AttentionSpec):
        ring = -(-(block.window + RING_STEP + RING_SPARE) // 16) * 16
        positions = ring if block.window and ring < context else context
        nbytes += 2 * block.kv_heads * (positions + SPARE_POSITIONS) * bytes_of_head
    return nbytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_bytes_of_the_cache_equal_the_formula(name: str, context: int) -> None:
    spec = spec_of(name)
    head_dim = spec.specs(AttentionSpec)[0].head_dim
    groups = head_dim // 32
    sizes: dict[CacheType, int] = {
        "f16": 2 * head_dim,
        "q8_0": head_dim + 2 * groups,
        "q4_0": head_dim // 2 + 2 * groups,
    }
    for kind, nbytes in sizes.items():
        assert DecoderState.nbytes_for(spec, context, kind) == formula(spec, context, nbytes)


def test_the_cache_of_gemma_3_27b_fits_a_fifth_of_the_memory() -> None:
    spec = spec_of("gemma-3-27b")
    assert DecoderState.nbytes_for(with_rings(spec, 0), 32768, "f16") >= 15.5 * GIB
    assert DecoderState.nbytes_for(spec, 32768, "f16") <= 3.3 * GIB


@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_the_page_is_true(name: str) -> None:
    (line,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    spec = spec_of(name)
    caches = [each for context in CONTEXTS for each in ((with_rings(spec, 0), context), (spec, context))]
    cells = [f"{DecoderState.nbytes_for(each, context, 'f16') / MIB:,.0f}" for each, context in caches]
    assert [cell.strip() for cell in line.split("|")][-len(cells) :] == cells


def sizes_of(spec: DecoderSpec) -> ModelSizes:
    """The sizes of a dense decoder in Q4_K, but for its norms."""
    width, layers = spec.hidden_size, []
    for block in spec.specs(AttentionSpec):
        rows = [heads * block.head_dim for heads in (block.heads, block.kv_heads, block.kv_heads)]
        q, k, v = (
            MatrixSize(f"attn_{part}", "Q4_K", count, width) for part, count in zip("qkv", rows, strict=True)
        )
        output = MatrixSize("attn_output", "Q4_K", width, rows[0])
        second = feed_forward(width, 4 * width, "Q4_K")
        layers.append(LayerSizes((AttentionSizes(block, q, k, v, output, (width,)), second)))
    return ModelSizes(width, 262144, tuple(layers), MatrixSize("token_embd", "Q6_K", 262144, width))


def cached(plan: MemoryPlan) -> dict[str, int]:
    """The bytes of keys and values in a plan, for each kind of cache."""
    nbytes: dict[str, int] = {}
    for item in plan.items:
        if "keys and values" in item.item:
            name = item.item.removeprefix(f"layer {item.layer} ")
            nbytes[name] = nbytes.get(name, 0) + item.bytes
    return nbytes


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_plan_of_gemma_3_27b_counts_rings(device: str) -> None:
    machine = server() if device == "gpu" else cpu_only(64 * GIB)
    spec, options = spec_of("gemma-3-27b"), PlanOptions(32768, kv="f16")
    plan = plan_memory(sizes_of(spec), machine, options)
    assert {item.device for item in plan.items if "keys and values" in item.item} == {device}
    nbytes = cached(plan)
    assert nbytes.keys() == {"keys and values", "keys and values, 1808 positions"}
    assert sum(nbytes.values()) <= 3.3 * GIB
    if device == "cpu":
        assert sum(nbytes.values()) == DecoderState.nbytes_for(spec, 32768, "f16")
    assert re.search(r"^52 layers: keys and values, 1808 .*\n  positions$", plan.explain(), re.MULTILINE)
    whole = plan_memory(sizes_of(with_rings(spec, 0)), machine, options)
    assert sum(cached(whole).values()) >= 15.5 * GIB
    speeds = [each.prediction.decode_tokens_per_second for each in (plan, whole)]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.01)


def test_a_short_context_has_no_rings() -> None:
    spec = spec_of("gemma-3-27b")
    ring = spec.specs(AttentionSpec)[0].ring
    assert ring == 1808
    nbytes = [DecoderState.nbytes_for(spec, context, "f16") for context in (ring - 16, ring, ring + 16)]
    of_all = DecoderState.nbytes_for(with_rings(spec, 0), ring, "f16")
    assert nbytes[0] < nbytes[1] == of_all < nbytes[2]
    plan = plan_memory(sizes_of(spec), cpu_only(64 * GIB), PlanOptions(ring))
    assert cached(plan).keys() == {"keys and values"}
