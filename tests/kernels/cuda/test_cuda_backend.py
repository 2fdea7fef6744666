"""The whole backend against the reference in float64: prompts, small steps, samples queued ahead."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer_kernels.cuda.decode.decode_attention import EARLY_SPLITS
from edgeinfer_kernels.cuda.tuning.step_shapes import MIN_SPLIT_POSITIONS, Tuning
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import FLOATS_AGREE, distances, opened, read, sample_greedy, worst
from tests.model_zoo import ON_CPU_ONLY, SMALL_GEMMA3N, ZOO
from tests.random_models import RandomModel
from tests.zoo.scaled_models import scaled

QUANTS_AGREE = 0.04
"""Quantized weights: every activation was rounded to eight bits."""
QUANTIZED = ("Q8_0", "Q4_0")
WIDE_HEADS = replace(ZOO["llama"], width=256, head_dim=64, feed_forward=256)
"""Rows of whole blocks of every type."""

# property under test -> the model, and the layers that cover it
FACTS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "nothing special": (ZOO["llama"], (0,)),
    "quantized": (replace(ZOO["llama"], formats=QUANTIZED), (0,)),
    "quantized, biases of q, k, v": (replace(ZOO["qwen2"], formats=QUANTIZED), (0,)),
    "small types": (replace(WIDE_HEADS, formats=("NVFP4", "TQ1_0", "Q2_0")), (0,)),
    "small types of experts": (
        replace(WIDE_HEADS, experts=4, experts_per_token=2, formats=("Q2_0", "NVFP4", "TQ1_0")),
        (0,),
    ),
    "grids": (replace(WIDE_HEADS, formats=("IQ2_XS", "IQ3_S", "IQ1_M")), (0,)),
    "grids of experts": (
        replace(WIDE_HEADS, experts=4, experts_per_token=2, formats=("IQ3_XXS", "IQ2_S", "IQ1_S")),
        (0,),
    ),
    "factors of matrices": (scaled(WIDE_HEADS), (0,)),
    "factors of experts": (scaled(replace(WIDE_HEADS, experts=4, experts_per_token=2)), (0,)),
    "partial RoPE, heads of 24": (RandomModel("llama", head_dim=24, extra={"rope.dimension_count": 8}), (0,)),
    "norms behind blocks, of heads; windows; tied": (ZOO["gemma3"], (4, 5)),
    "soft caps": (ZOO["gemma2"], (0,)),
    "norms of whole q and k rows, none before blocks": (ZOO["olmo2"], (0,)),
    "layer norms, biases, no gate": (ZOO["starcoder2"], (0,)),
    "no RoPE": (ZOO["smollm3"], (3,)),
    "attention and a feed-forward in parallel": (ZOO["command-r"], (0, 1)),
    "parallel blocks, windows, RoPE only in them": (replace(ZOO["cohere2"], formats=QUANTIZED), (2, 3)),
    "queries with a factor of their position": (ZOO["mistral3"], (0, 1)),
    "norms of heads after RoPE": (ZOO["hunyuan-dense"], (0, 1)),
    "norms without weights": (ZOO["olmo"], (0,)),
    "scales of logits, residuals, embeddings, attention": (ZOO["granite"], (0,)),
    "a bias of the head, parallel blocks with biases": (ZOO["phi2"], (0,)),
    "a bias of the head and of norms, experts": (replace(ZOO["phimoe"], formats=QUANTIZED), (0,)),
    "ALiBi, a norm of the embedding": (ZOO["bloom"], (0,)),
    "ALiBi, a clamp of q, k and v, heads that aren't a power of two": (
        replace(ZOO["mpt"], formats=QUANTIZED),
        (0,),
    ),
    "learned positions": (ZOO["gpt2"], (0, 1)),
    "learned positions, quantized": (replace(ZOO["starcoder"], formats=QUANTIZED), (0,)),
    "parallel blocks with a norm of each": (ZOO["gptneox"], (0, 1)),
    "parallel blocks with a norm of each, quantized": (
        replace(ZOO["falcon-40b"], formats=QUANTIZED),
        (0, 1),
    ),
    "a clamp before RoPE": (ZOO["olmo-clamp"], (0,)),
    "norms before the last projections": (ZOO["bitnet"], (0, 1)),
    "norms before the last projections, scales of matrices": (ZOO["bitnet-scales"], (0,)),
    "norms before the last projections, quantized": (
        replace(ZOO["bitnet-scales"], formats=QUANTIZED),
        (0,),
    ),
    "ReLU squared": (ZOO["arcee"], (0,)),
    "heads and KV heads by layer, values from keys, layer scales": (ZOO["gemma4"], (0, 2, 3)),
    "heads by layer, quantized": (replace(ZOO["gemma4"], formats=QUANTIZED), (1, 2)),
    "shared KV caches, per-layer embeddings": (ZOO["gemma4-per-layer"], (0, 1, 2, 3, 4, 5)),
    "per-layer embeddings, quantized": (
        replace(ZOO["gemma4-per-layer"], formats=QUANTIZED),
        (0, 1, 2, 3, 4, 5),
    ),
    "AltUp, Laurel, few active neurons": (SMALL_GEMMA3N, ()),
    "AltUp, Laurel, few active neurons, quantized": (replace(SMALL_GEMMA3N, formats=QUANTIZED), ()),
    "experts besides a dense feed-forward": (ZOO["gemma4-moe"], (0, 1)),
    "experts besides a dense feed-forward, quantized": (replace(ZOO["gemma4-moe"], formats=QUANTIZED), (0,)),
    "short convolutions": (ZOO["lfm2"], (0, 1, 2, 3)),
    "gated delta nets": (ZOO["qwen35"], (0, 1, 2, 3)),
    "repeated key heads": (ZOO["qwen3next"], (0, 1, 2)),
    "Kimi Delta Attention": (ZOO["kimi-linear"], (0, 1, 3)),
    "Kimi Delta Attention, heads of 96": (ZOO["kimi-linear-wide-heads"], (0, 1)),
    "Kimi Delta Attention, quantized": (replace(ZOO["kimi-linear"], formats=QUANTIZED), (0, 1)),
    "Mamba-2": (ZOO["mamba2"], (0, 1)),
    "Mamba-2 in groups": (ZOO["mamba2-groups"], (0,)),
    "Mamba-2, attention without RoPE, feed-forwards": (ZOO["granitehybrid"], (1, 2, 3)),
    "Mamba-2 and attention in parallel": (ZOO["falcon-h1"], (0, 1, 2)),
    "parallel blocks, groups, quantized": (replace(ZOO["falcon-h1-groups"], formats=QUANTIZED), (0,)),
    "Mamba-1": (ZOO["mamba"], (0, 1)),
    "Mamba-1, dt, B and C normalized": (ZOO["mamba-normed"], (0, 1)),
    "Mamba-1 and attention, experts by router": (ZOO["jamba-moe"], (1, 2, 3)),
    "time mixing, channel mixing, a norm of the embedding": (ZOO["rwkv7"], (0, 1, 2)),
    "RWKV-7, quantized": (replace(ZOO["rwkv7"], formats=QUANTIZED), (0, 1)),
    "layers of single blocks": (ZOO["nemotron_h"], (0, 1, 2, 3)),
    "latent attention": (replace(ZOO["deepseek2"], dense_layers=3), (0, 1)),
    "latent attention, YaRN, one matrix for queries": (ZOO["deepseek2-lite"], (0,)),
    "latent attention, queries with a factor of their position": (ZOO["mistral4"], (0,)),
    "latent attention, quantized": (replace(ZOO["deepseek2"], formats=QUANTIZED), (0,)),
    "experts": (ZOO["mixtral"], (0,)),
    "experts, quantized": (replace(ZOO["qwen3moe"], formats=QUANTIZED), (0,)),
    "experts, and a weighed one for all": (replace(ZOO["qwen2moe"], formats=QUANTIZED), (0,)),
    "experts, and a plain one for all": (ZOO["granitemoe-shared"], (0,)),
    "experts by sigmoid, router before attention": (ZOO["smallthinker"], (0, 1)),
    "experts without gates, a bias of the selection": (ZOO["nemotron_h_moe"], (0, 1)),
    "experts without gates, quantized": (replace(ZOO["nemotron_h_moe"], formats=QUANTIZED), (1,)),
    "experts of a latent projection": (ZOO["nemotron_h_moe-latent"], (0, 1)),
    "experts of a latent projection, quantized": (
        replace(ZOO["nemotron_h_moe-latent"], formats=QUANTIZED),
        (0,),
    ),
    "experts by softmax, a bias of the selection": (ZOO["ernie4_5-moe"], (1,)),
    "experts of groups, a bias of the selection": (ZOO["bailingmoe2"], (0, 1)),
    "experts of groups by softmax": (replace(ZOO["deepseek2-groups"], dense_layers=0), (0,)),
    "weights of experts before them": (ZOO["llama4"], (1, 2, 3)),
    "weights of experts before them, quantized": (replace(ZOO["llama4"], formats=QUANTIZED), (1,)),
    "a norm of the experts' sum": (ZOO["afmoe"], (2, 3)),
    "a norm of the experts' sum, quantized": (replace(ZOO["afmoe"], formats=QUANTIZED), (4,)),
    "one gate for a head, heads by layer, limits of SwiGLU": (ZOO["step35"], (0, 1, 2, 4)),
    "one gate for a head, limits of SwiGLU, quantized": (replace(ZOO["step35"], formats=QUANTIZED), (0, 4)),
    "softplus gates of heads": (ZOO["laguna"], (0, 1)),
    "softplus gates of heads, quantized": (replace(ZOO["laguna"], formats=QUANTIZED), (1,)),
    "softplus gates of elements": (ZOO["laguna-gates-of-elements"], (0, 1)),
    "experts with biases, clamped; sinks, windows": (ZOO["gpt-oss"], (0, 1)),
    "values shorter than keys, sinks, windows": (ZOO["mimo2"], (0, 1)),
    "values shorter than keys, quantized": (replace(ZOO["mimo2"], formats=QUANTIZED), (0, 2)),
    "values of one and a half tiles": (replace(ZOO["mimo2-fused"], heads=8, kv_heads=4), (0, 1)),
    "a dense layer below experts": (replace(ZOO["olmoe"], dense_layers=1, expert_length=64), (0, 1)),
}


def tolerance(model: RandomModel) -> float:
    """A recurrent block multiplies several projections, each with its error."""
    within = FLOATS_AGREE if model.formats == ("F32",) else QUANTS_AGREE
    return 3 * within if model.convolutions or model.hybrid else within


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("fact", FACTS)
def test_a_prompt_and_steps_equal_the_reference(device: str, tmp_path: Path, fact: str) -> None:
    model, layers = FACTS[fact]
    with opened(model, tmp_path, layers) as decoder:
        ids = decoder.ids(14)
        backend = decoder.backend(device)
        result = read(backend, ids, (11, 1, 2))
        backend.close()
        assert sorted(result) == [9, 10, 11, 12, 13]
        assert worst(result, decoder.reference_logits(ids)) < tolerance(model)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mimo2"])
def test_a_long_cache_is_read_in_kv_splits(device: str, tmp_path: Path, name: str) -> None:
    with opened(ZOO[name], tmp_path, (0,)) as decoder:
        ids = decoder.ids(44)
        backend = decoder.backend(device, chunk=40)
        result = read(backend, ids, (40, 1, 3), expected=1)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < FLOATS_AGREE


@pytest.mark.slow
def test_programs_of_many_kv_splits_run_to_the_end(device: str, tmp_path: Path) -> None:
    """A large cache has more KV splits than those whose empty programs end early."""
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(23)
        context, tuning = 17 * MIN_SPLIT_POSITIONS, Tuning()
        assert tuning.splits_for(context) > EARLY_SPLITS
        backend = decoder.backend(device, tuning, context)
        result = read(backend, ids, (16, 1, 2, 4), expected=1)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < FLOATS_AGREE


def test_an_eight_bit_cache_differs_by_its_rounding_only(device: str, tmp_path: Path) -> None:
    with opened(ZOO["qwen3"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(14)
        backend = decoder.backend(device, kv="q8_0")
        result = read(backend, ids, (11, 1, 2))
        backend.close()
        error = worst(result, decoder.reference_logits(ids))
        assert 1e-4 < error < 0.02


def test_all_logits_of_a_prompt_are_available(device: str, tmp_path: Path) -> None:
    with opened(ZOO["arcee"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(10)
        backend = decoder.backend(device)
        result = read(backend, ids, (10,), expected=10)
        backend.close()
        assert sorted(result) == list(range(10))
        assert worst(result, decoder.reference_logits(ids)) < FLOATS_AGREE


def test_a_prompt_can_be_evaluated_again_from_the_middle(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(12)
        other = [*ids[:9], *reversed(ids[9:])]
        backend = decoder.backend(device)
        read(backend, other, (10, 1, 1), expected=1)
        x = backend.embed(ids[9:])
        backend.forward(x, 9)
        logits, rows = backend.logits(x), backend.final_norm(x)
        backend.close()
        expected = decoder.reference_logits(ids)
        head = decoder.weights.output.decoded().astype(np.float64)
        assert worst({9 + row: head @ rows[row] for row in range(3)}, expected) < FLOATS_AGREE
        assert worst({9 + row: logits[row].astype(np.float64) for row in range(3)}, expected) < FLOATS_AGREE


def test_later_forwards_do_not_change_returned_logits(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        ids = decoder.ids(4)
        backend = decoder.backend(device)
        logits_kept, copies = [], []
        for position in range(0, 4, 2):
            x = backend.embed(ids[position : position + 2])
            backend.forward(x, position)
            logits_kept.append(backend.logits(x))
            copies.append(logits_kept[-1].copy())
        backend.close()
        assert not np.array_equal(copies[0], copies[1])
        np.testing.assert_array_equal(logits_kept, copies)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [("F32",), QUANTIZED])
def test_a_table_of_per_layer_embeddings_on_the_device_changes_no_result(
    device: str, tmp_path: Path, formats: tuple[str, ...]
) -> None:
    results = []
    with opened(replace(ZOO["gemma4-per-layer"], formats=formats), tmp_path, (0, 1, 2)) as decoder:
        ids = decoder.ids(15)
        for here in (False, True):
            backend = decoder.backend(device, per_layer_here=here)
            assert backend.nbytes == decoder.counted_bytes(device, per_layer_here=here)
            results.append(read(backend, ids, (11, 1, 3)))
            backend.close()
    for at, row in results[0].items():
        np.testing.assert_array_equal(row, results[1][at])


@pytest.mark.parametrize(
    ("name", "layers", "options"),
    [
        ("starcoder2", (0,), {}),
        pytest.param("gemma4-per-layer", tuple(range(6)), {}, marks=pytest.mark.slow),
        ("gemma4-per-layer", (0, 1, 2), {"per_layer_here": True}),
    ],
)
def test_samples_queued_ahead_equal_those_of_single_steps(
    device: str, tmp_path: Path, name: str, layers: tuple[int, ...], options: dict[str, Any]
) -> None:
    steps = 12 if HAS_GPU else 3
    with opened(ZOO[name], tmp_path, layers) as decoder:
        backend = decoder.backend(device, **options)
        plain = [decoder.ids(1)[0]]
        for position in range(steps):
            x = backend.embed(plain[-1:])
            backend.forward(x, position)
            plain.append(int(backend.logits(x)[0].argmax()))
        ahead = plain[:1]
        for position in range(steps):
            ahead.append(sample_greedy(backend, ahead[-1], position, position + 1 < steps))
        assert ahead == plain
        # another token than the one that the device continued with, and from an earlier position
        sample_greedy(backend, plain[0], 0, True)
        changed = (plain[1] + 1) % decoder.specification.vocabulary_size
        chosen = sample_greedy(backend, changed, 1, False)
        backend.close()
        expected = decoder.reference_logits([plain[0], changed])[1]
        assert expected.max() - expected[chosen] < FLOATS_AGREE * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("chunk", [5, 16])
def test_a_token_attends_to_its_chunk(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    row = replace(ARCHITECTURES["llama4"], chunk_window=chunk)
    monkeypatch.setitem(ARCHITECTURES, "llama4", row)
    with opened(ZOO["llama4"], tmp_path, (2, 3)) as decoder:
        ids = decoder.ids(26)
        backend = decoder.backend(device)
        result = read(backend, ids, (12, 1, 3, 1, 5, 4), expected=1)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < FLOATS_AGREE


def test_more_tokens_than_a_chunk_are_refused(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(device)
        with pytest.raises(ValueError, match="17 tokens in one step; the backend was loaded for 16"):
            backend.embed([1] * 17)
        backend.close()


def test_a_matrix_without_a_kernel_is_named_before_allocation(device: str, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        head = replace(decoder.weights.output, format="F64")
        broken = replace(decoder, weights=replace(decoder.weights, output=head))
        with pytest.raises(UnsupportedOnDeviceError, match=r"output\.weight: F64 has no kernel on the GPU"):
            broken.backend(device)


def test_experts_with_rows_smaller_than_a_program_are_named(device: str, tmp_path: Path) -> None:
    model, expected = (
        replace(ZOO["qwen3moe"], expert_length=40),
        r"blk\.0\.ffn_up_exps\.weight: 40 rows per expert",
    )
    with opened(model, tmp_path) as decoder, pytest.raises(UnsupportedOnDeviceError, match=expected):
        decoder.backend(device)


ON_GPU = pytest.mark.skipif(not HAS_GPU, reason="takes minutes without a GPU")
# deep models of random weights amplify every rounding
DEEP = 3


@pytest.mark.slow
@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("formats", [("F32",), QUANTIZED, ("F16", "Q4_1")], ids="-".join)
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ON_CPU_ONLY])
def test_every_architecture_equals_the_reference(
    device: str,
    tmp_path: Path,
    name: str,
    formats: tuple[str, ...],
    record_property: Callable[[str, object], None],
) -> None:
    model = replace(ZOO[name], formats=formats)
    with opened(model, tmp_path) as decoder:
        ids = decoder.ids(24)
        backend = decoder.backend(device)
        logits = read(backend, ids, (12, 1, 3, 1, 3, 1, 3), expected=12)
        backend.close()
        result = distances(logits, decoder.reference_logits(ids))
    record_property("median", f"{np.median(result):.2g}")
    record_property("worst", f"{max(result):.2g}")
    # a token with a near-tie in the router may select another expert
    distance = float(np.median(result)) if model.experts else max(result)
    assert distance < DEEP * tolerance(model)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe", "mimo2"])
def test_steps_of_any_token_count_equal_the_reference(device: str, tmp_path: Path, name: str) -> None:
    model = replace(ZOO[name], formats=QUANTIZED)
    with opened(model, tmp_path, (0,)) as decoder:
        ids = decoder.ids(48)
        backend = decoder.backend(device)
        result = read(backend, ids, (12, 1, 2, 3, 4, 5, 6, 7, 8), expected=12)
        backend.close()
        assert worst(result, decoder.reference_logits(ids)) < tolerance(model)
