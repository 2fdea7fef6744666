"""The bytes that a plan counts are the bytes that loading allocates."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.model_config.file_sizes import file_sizes
from edgeinfer.model_config.weights import read_config
from edgeinfer_kernels.blocks.attention import AttentionSizes, AttentionState
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.pages import HUGE_PAGE
from edgeinfer_offload.machine.hardware import Machine, Processor
from edgeinfer_offload.planner.memory_plan import PlanError
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.planner import largest_context, plan_memory
from edgeinfer_quant_formats import GGUFFile
from tests.edgeinfer.conftest import ZooFile
from tests.model_zoo import SMALL_GEMMA3N, ZOO

SPARE = 4096
"""What `allocate` adds after every array for kernels that read ahead."""
MIXED = replace(ZOO["llama"], width=256, feed_forward=512, formats=("Q4_K", "Q8_0", "Q6_K", "F16"))
TERNARY = replace(MIXED, formats=("Q8_0", "TQ1_0"))
MODELS = {**ZOO, "mixed": MIXED, "ternary": TERNARY, "small gemma3n": SMALL_GEMMA3N}


@pytest.mark.default_cases(3)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "phi3", "starcoder2", "mixed", "gpt-oss", "qwen2moe", "smallthinker"),
        "deepseek2",
        *("bitnet-scales", "small gemma3n", "gemma4-per-layer", "mimo2"),
        pytest.param("ternary", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kv", ["f16", "f32", "fp8", "q8_0", "q4_0", "q8_0/q4_0", "q4_0+f16"])
def test_weights_cache_and_workspace_have_the_planned_sizes(tmp_path: Path, name: str, kv: CacheType) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, kv=kv, threads=2, context=100) as model:
        assert model.plan is not None
        engine = model.engine
        assert isinstance(engine, NativeEngine)
        assert isinstance(engine.backend, CpuBackend)
        planned = {"keys and values": 0, "rest": 0}
        for item in model.plan.items:
            if item.device == "disk":  # the embedding is memory-mapped
                continue
            planned["keys and values" if "keys and values" in item.item else "rest"] += item.bytes
        states = engine.backend.state.blocks.values()
        caches = [state.cache for state in states if isinstance(state, AttentionState | LatentAttentionState)]
        of_cache = {id(array) for cache in caches for array in cache.arrays()}
        byte_arrays = [each for each in engine.backend.decoder.arena.arrays if each.dtype == np.uint8]
        arrays = [each for each in byte_arrays if id(each) not in of_cache]
        assert all(array.nbytes < HUGE_PAGE for array in arrays)
        assert planned["keys and values"] == engine.cache.nbytes
        assert planned["rest"] == sum(array.nbytes - SPARE for array in arrays)


def test_rings_have_the_planned_sizes(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("gemma4-per-layer"), threads=1, device="cpu", context=900) as model:
        assert model.plan is not None
        caches = {item.item: item.bytes for item in model.plan.items if "keys and values" in item.item}
        assert isinstance(model.engine, NativeEngine)
        assert sum(caches.values()) == model.engine.cache.nbytes
    # Two layers of two heads of 16 in float16 with rings, one of one head of 32; 64 more positions for each.
    rings = {f"layer {layer} keys and values, 800 positions": 4 * (800 + 64) * 32 for layer in (0, 1)}
    assert caches == {**rings, "layer 2 keys and values": 4 * (912 + 64) * 32}


def test_a_token_reads_the_experts_that_it_uses(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("qwen2moe"), threads=1, device="cpu") as model:
        assert model.plan is not None
        items = {item.item: item for item in model.plan.items}
    assert {"layer 0 attention", "layer 0 router and shared expert", "layer 0 experts"} <= items.keys()
    # Seven experts of three matrices 64 by 32 in float32, of which a token uses three.
    experts = items["layer 0 experts"]
    assert (experts.bytes, experts.weights_read) == (7 * 3 * 64 * 32 * 4, 3 * 3 * 64 * 32 * 4)
    # The router's seven rows fill a group of sixteen; the shared expert is 128 wide.
    shared = items["layer 0 router and shared expert"]
    assert shared.bytes == shared.weights_read == (16 * 64 + 3 * 128 * 64) * 4


def test_every_layer_has_its_items(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), threads=2, context=100) as model:
        assert model.plan is not None
        items = {item.item: item for item in model.plan.items}
        assert isinstance(model.engine, NativeEngine)
        specification = model.engine.specification
        assert model.engine.bytes_per_token == sum(item.weights_read for item in items.values())
    for layer in range(3):
        assert items[f"layer {layer} attention"].weights_read == items[f"layer {layer} attention"].bytes > 0
        assert items[f"layer {layer} feed-forward"].device == "cpu"
        # Keys and values, two heads of 16 in two bytes each; whole tiles of 16 positions, and 64 spare ones.
        assert items[f"layer {layer} keys and values"].bytes == 2 * 2 * (112 + 64) * 16 * 2
    assert {"head", "workspace"} <= items.keys()
    assert items["embedding"].device == "disk"
    planned = sum(item.bytes for item in items.values() if "keys and values" in item.item)
    assert planned == DecoderState.nbytes_for(specification, 100, "f16")


def test_per_layer_embeddings_stay_in_the_file_and_shared_caches_are_counted_once(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("gemma4-per-layer"), threads=1, device="cpu") as model:
        assert model.plan is not None
        items = {item.item: item for item in model.plan.items}
    # Six layers of 32 elements in float32.
    table = items["per-layer embeddings"]
    assert (table.device, table.bytes) == ("disk", 288 * 6 * 32 * 4)
    caches = [name for name in items if "keys and values" in name]
    assert caches == [f"layer {layer} keys and values" for layer in range(3)]


@pytest.mark.parametrize("kind", ["f16", "f32", "fp8", "q8_0", "q4_0", "q8_0/q4_0", "q4_0+f16"])
@pytest.mark.parametrize("free", [10_000, 500_000, 600_000, 700_000])
def test_the_largest_context_is_bounded_by_memory_and_training(
    zoo_file: ZooFile, kind: CacheType, free: int
) -> None:
    with GGUFFile.open(zoo_file("llama")) as file:
        config = read_config(file)
        sizes = file_sizes(file, config)
    machine = Machine(Processor("", 2, 1 << 40, free, 1e10, 1e12))
    options = PlanOptions(64, kv=kind, device="cpu")
    largest = largest_context(sizes, machine, options, trained=256)

    def fits(context: int) -> bool:
        try:
            plan_memory(sizes, machine, replace(options, context=context))
        except PlanError:
            return False
        return True

    assert largest == 0 or fits(largest)
    assert largest == 256 or not fits(largest + 1)


def needed(path: Path, context: int) -> int:
    with edgeinfer.load(path, context=context, threads=1) as model:
        assert model.plan is not None
        return model.plan.nbytes


def test_a_budget_is_exact_to_the_byte_and_the_context_that_fits_is_named(zoo_file: ZooFile) -> None:
    path = zoo_file("llama")
    bytes_for_100 = needed(path, 100)
    edgeinfer.load(path, context=100, ram=bytes_for_100, threads=1).close()
    with pytest.raises(OutOfMemoryError) as caught:
        edgeinfer.load(path, context=113, ram=bytes_for_100, threads=1)
    text = str(caught.value)
    mebibytes = f"{bytes_for_100 / 2**20:.1f} MiB"
    assert text.startswith("llama: the model needs ")
    assert f"{mebibytes} may be used" in text
    assert "the largest part is the workspace with" in text
    # Positions are allocated in tiles of 16.
    assert text.endswith("with a context of 112 it fits (context=)")
    edgeinfer.load(path, context=112, ram=bytes_for_100, threads=1).close()


def test_a_budget_too_small_for_any_context_suggests_a_smaller_model(zoo_file: ZooFile) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        edgeinfer.load(zoo_file("llama"), ram="64 KiB")
    assert "0.1 MiB may be used" in str(caught.value)
    assert str(caught.value).endswith("take a smaller model or fewer bits per weight")


def test_a_context_beyond_memory_is_refused_before_allocation(zoo_file: ZooFile) -> None:
    with pytest.raises(OutOfMemoryError, match="with a context of 256 it fits"):
        edgeinfer.load(zoo_file("llama"), context=1 << 40)


def test_layers_that_share_a_cache_read_it(zoo_file: ZooFile) -> None:
    with GGUFFile.open(zoo_file("gemma4-per-layer")) as file:
        blocks = file_sizes(file, read_config(file)).of_kind(AttentionSizes)
    sharing = [block for block in blocks if block.spec.source_layer is not None]
    assert sharing
    for block in sharing:
        source = blocks[block.spec.source_layer or 0]
        assert block.state_bytes(900, "f16") == block.state_device_bytes(900, "f16") == 0
        assert block.read_state_bytes(900, "f16") == source.state_bytes(900, "f16") > 0
        assert block.read_state_device_bytes(900, "q8_0") == source.state_device_bytes(900, "q8_0") > 0
