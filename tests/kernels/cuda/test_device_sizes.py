"""The byte counts without torch equal the allocations on the device, to the byte."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.moe import MoeSizes
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, check_capability, count_parts
from edgeinfer_kernels.cuda.weights.device_model import Part
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec, ResidualBlock
from edgeinfer_kernels.sizes import cuda_buffers, cuda_matrices
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from tests.kernels.cuda.decoders import CONTEXT, opened
from tests.kernels.split_layers import LayerSplit, stages_of
from tests.model_zoo import ON_CPU_ONLY, ZOO
from tests.random_models import RandomModel

WIDE = replace(ZOO["llama"], width=512, feed_forward=768, formats=("Q4_K", "Q6_K", "F16", "Q5_1", "Q3_K"))
MODELS: dict[str, RandomModel] = {
    **{name: model for name, model in ZOO.items() if name not in ON_CPU_ONLY},
    "many formats": WIDE,
    "odd vocabulary": replace(WIDE, tied=True),
    "deepseek2 dense": replace(ZOO["deepseek2"], dense_layers=3),
}


def counted(parts: list[Part], *endings: str) -> int:
    return sum(part.nbytes for part in parts if part.name.endswith(endings))


def divisible_bytes(layer: LayerSizes) -> int:
    block = layer.divisible
    if block is None:
        return 0
    times = block.granules if block.is_routed else 1
    return times * block.granules_device_bytes() + block.undivided_device_bytes()


def most_over(layer: LayerSizes) -> int:
    """The count rounds up each expert's biases; the device has those of all in one vector."""
    block = layer.routed
    if not isinstance(block, MoeSizes):
        return 0
    return block.granules * len(block.expert.vectors) * cuda_matrices.ALIGNMENT


@pytest.mark.default_cases
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0", "q4_0+f16"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_sizes_equal_allocated_sizes(tmp_path: Path, name: str, kind: CacheType) -> None:
    with opened(MODELS[name], tmp_path) as decoder:
        parts = count_parts(
            decoder.specification,
            decoder.weights,
            CONTEXT,
            torch.device("cpu"),
            DeviceOptions(kv=kind),
        )
        sizes = ModelSizes.of(decoder.specification, decoder.weights)
    undivided = [block for layer in sizes.layers for block in layer.undivided]
    attention = sum(block.undivided_device_bytes() for block in undivided)
    kinds = (
        "attention",
        "convolution",
        "delta net",
        "delta attention",
        "mamba2",
        "mamba",
        "mixing",
        "layer output",
        "positions",
        "AltUp",
        "Laurel",
        "gaussian feed-forward",
    )
    undivided_parts = counted(parts, *kinds, "embedding norm", "layer output")
    assert attention + sizes.rope_device_bytes(CONTEXT) == undivided_parts
    blocks = sum(map(divisible_bytes, sizes.layers))
    vectors = [layer.divisible.undivided_vectors() for layer in sizes.layers if layer.divisible]
    blocks += sum(map(cuda_matrices.vector_bytes, vectors))
    units = counted(parts, "feed-forward") - counted(parts, "gaussian feed-forward")
    over = blocks - units - counted(parts, "inactive experts")
    assert 0 <= over <= sum(map(most_over, sizes.layers))
    caches = sum(block.state_device_bytes(CONTEXT, kind) for block in sizes.blocks)
    assert caches == counted(parts, "keys and values")
    assert sizes.head_device_bytes() == counted(parts, "head")
    embedding = cuda_matrices.matrix_bytes(sizes.embedding) if sizes.embedding else 0
    assert embedding == counted(parts, "embedding")
    assert cuda_buffers.workspace_bytes(sizes, CONTEXT, kind=kind) == counted(parts, "workspace")


def test_recurrent_states_of_several_sequences_take_the_predicted_bytes(tmp_path: Path) -> None:
    with opened(MODELS["qwen35"], tmp_path) as decoder:
        context, sizes = pool_positions(CONTEXT, 3), ModelSizes.of(decoder.specification, decoder.weights)
        options = DeviceOptions(sequences=3)
        parts = count_parts(decoder.specification, decoder.weights, context, torch.device("cpu"), options)
    predicted = sum(block.states_device_bytes(CONTEXT, 3, "f16") for block in sizes.blocks)
    assert predicted == counted(parts, "keys and values")


STREAMING = {
    "llama": LayerSplit(True),
    "bitnet": LayerSplit(True),
    "bitnet-scales": LayerSplit(False),
    "mimo2": LayerSplit(True),
    "starcoder2": LayerSplit(False),
    "gpt-oss": LayerSplit(True, experts=(1,)),
    "granitemoe-shared": LayerSplit(True),
    "command-r": LayerSplit(True),
    "gptneox": LayerSplit(True),
    "mpt-positions": LayerSplit(False),
    "lfm2": LayerSplit(False),
    "qwen35": LayerSplit(False),
    "kimi-linear": LayerSplit(True),
    "mamba2-groups": LayerSplit(False),
    "granitehybrid-moe": LayerSplit(True),
    "falcon-h1": LayerSplit(False),
    "nemotron_h": LayerSplit(False),
    "mamba-normed": LayerSplit(False),
    "jamba-moe": LayerSplit(True),
    "afmoe": LayerSplit(True),
    "deepseek2 dense": LayerSplit(False),
    "nemotron_h_moe": LayerSplit(True),
    "nemotron_h_moe-latent": LayerSplit(True, experts=(1, 2)),
    "many formats": LayerSplit(False),
}


@pytest.mark.parametrize("name", STREAMING)
def test_weight_streaming_allocates_the_predicted_bytes(tmp_path: Path, name: str) -> None:
    with opened(MODELS[name], tmp_path) as decoder:
        sizes = ModelSizes.of(decoder.specification, decoder.weights)
        splits = [STREAMING[name]] * len(sizes.layers)
        splits[-1] = LayerSplit(True)
        stages = stages_of(decoder.specification, splits)
        taken = [
            sum(
                part.nbytes
                for part in count_parts(
                    decoder.specification,
                    decoder.weights,
                    CONTEXT,
                    torch.device("cpu"),
                    DeviceOptions(stages=stages, stream_min_tokens=stream_min_tokens),
                )
            )
            for stream_min_tokens in (None, 1)
        ]
    attends = not all(split.on_gpu for split in splits)
    counted = cuda_buffers.streaming_bytes(sizes, CONTEXT, attends)
    assert taken[0] < taken[1] <= taken[0] + counted
    pieces = cuda_buffers.STREAMED_PIECES * cuda_buffers.streamed_piece_bytes(sizes)
    assert taken[1] >= taken[0] + pieces


def test_unsupported_rows_are_refused_by_sizes_and_kernels(tmp_path: Path) -> None:
    model = replace(ZOO["llama"], heads=1, kv_heads=1, head_dim=24)
    with opened(model, tmp_path) as decoder:
        sizes = ModelSizes.of(decoder.specification, decoder.weights)
        with pytest.raises(UnsupportedOnDeviceError) as one:
            sizes.layers[0].blocks[0].undivided_device_bytes()
        with pytest.raises(UnsupportedOnDeviceError) as other:
            count_parts(decoder.specification, decoder.weights, CONTEXT, torch.device("cpu"))
    assert str(one.value) == str(other.value)


def one_layer(spec: AttentionSpec) -> DecoderSpec:
    layer = LayerSpec((ResidualBlock(spec, spec.norm, "attn_norm"),))
    return DecoderSpec(1024, 64, (layer,), spec.norm)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 512), (64, 4, 192)])
def test_heads_of_large_tiles_need_a_newer_gpu(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = AttentionSpec(heads, kv_heads, head_dim, 1.0, NormSpec("rms", 1e-6), None)
    check_capability(one_layer(replace(spec, heads=2 * kv_heads, head_dim=128)), 75)
    decoder = one_layer(spec)
    check_capability(decoder, 80)
    message = "attention needs compute capability 8.0, the GPU has 7.5"
    with pytest.raises(UnsupportedOnDeviceError, match=message):
        check_capability(decoder, 75)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_device_bytes_are_known_before_allocation(device: str, tmp_path: Path, kind: CacheType) -> None:
    with opened(replace(ZOO["gemma3"], formats=("Q8_0", "F16", "Q4_0")), tmp_path) as decoder:
        backend = decoder.backend(device, kv=kind)
        counted = decoder.counted_bytes(device, kv=kind)
        assert backend.nbytes == counted
        backend.close()


def test_a_token_reads_no_more_experts_than_it_uses(device: str, tmp_path: Path) -> None:
    with opened(replace(ZOO["qwen3moe"], formats=("Q8_0",)), tmp_path, (0,)) as decoder:
        options = DeviceOptions(chunk=16)
        parts = count_parts(decoder.specification, decoder.weights, 64, torch.device(device), options)
        nbytes = {part.name: part.nbytes for part in parts if part.read}
        resting = {part.name: part.nbytes for part in parts if not part.read}
        backend = decoder.backend(device)
        assert backend.nbytes == decoder.counted_bytes(device) == sum(part.nbytes for part in parts)
        backend.close()
    # Five of sixteen experts are used.
    share = resting["layer 0 inactive experts"] / (nbytes["layer 0 feed-forward"])
    assert 1.0 < share < 11 / 5
