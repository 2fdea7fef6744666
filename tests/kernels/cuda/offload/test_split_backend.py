"""A split decoder gives the logits of the unsplit one, for every split."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import Decoder, Logits, opened, worst
from tests.kernels.cuda.split_decoders import CPU_ONLY, device_layer, divisible_weights, split_decoder
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import ZOO
from tests.random_hybrids import interleaved_experts
from tests.random_models import RandomModel
from tests.zoo.scaled_models import scaled

TOLERANCE = 0.05
ATTENTION_ONLY = LayerSplit(on_gpu=True)
MODELS = {
    **ZOO,
    "deepseek2 dense": replace(ZOO["deepseek2"], dense_layers=3),
    "mimo2": replace(ZOO["mimo2"], feed_forward=160),
    "afmoe experts": replace(ZOO["afmoe"], dense_layers=0),
    "factors": scaled(replace(ZOO["llama"], width=128, head_dim=32, feed_forward=256)),
    "factors of experts": scaled(replace(ZOO["qwen3moe"], width=128, head_dim=32, expert_length=64)),
    "llama4 experts": replace(ZOO["llama4"], hybrid=interleaved_experts(1)),
}


def read_split(backend: SplitBackend, ids: list[int], counts: tuple[int, ...]) -> dict[int, Logits]:
    """Position -> logits of the last token of each step."""
    result, done = {}, 0
    for count in counts:
        x = backend.embed(ids[done : done + count])
        backend.forward(x, done)
        result[done + count - 1] = backend.logits(x[-1:])[0].astype(np.float64)
        done += count
    return result


def cut(at: int) -> Callable[[Decoder, int], LayerSplit]:
    """Whole layers, those before `at` on the CPU."""
    return lambda decoder, index: CPU_ONLY if index < at else device_layer(decoder, index)


def attention_alone(decoder: Decoder, index: int) -> LayerSplit:
    """All attention on the GPU, all feed-forwards and experts on the CPU."""
    return ATTENTION_ONLY


def every_second(decoder: Decoder, index: int) -> LayerSplit:
    """All attention on the GPU, and every second feed-forward."""
    return device_layer(decoder, index) if index % 2 else ATTENTION_ONLY


def mixed(decoder: Decoder, index: int) -> LayerSplit:
    """Every kind of layer in turn, CPU layers between GPU layers."""
    kinds = [ATTENTION_ONLY, CPU_ONLY, device_layer(decoder, index), CPU_ONLY]
    return kinds[index % 4]


def split_halves(decoder: Decoder, index: int) -> LayerSplit:
    """Some neurons of every feed-forward on the GPU, in one layer all; of every MoE layer some experts."""
    second = divisible_weights(decoder, index)
    if isinstance(second, MoeWeights):
        numbers = range(second.ffn_up_exps.experts)
        return LayerSplit(True, experts=tuple(n for n in numbers if n % 3 == index % 3))
    if not isinstance(second, FeedForwardWeights):
        return ATTENTION_ONLY
    fifths = second.ffn_up.rows // 5
    return LayerSplit(True, neurons=(2 * fifths, 4 * fifths, 5 * fifths)[index % 3])


Divide = Callable[[Decoder, int], LayerSplit]


def on_a_gpu(*values: Any) -> Any:
    """A case that isn't interpreted: it covers little more than the others and takes long."""
    return pytest.param(*values, marks=pytest.mark.skipif(not HAS_GPU, reason="run on a GPU"))


CASES = [
    ("llama", cut(1)),
    ("starcoder2", cut(2)),
    on_a_gpu("smallthinker", cut(3)),
    on_a_gpu("llama", attention_alone),
    ("starcoder2", attention_alone),
    ("gemma3", mixed),
    ("gemma4", mixed),
    on_a_gpu("granite", mixed),
    ("llama", split_halves),
    on_a_gpu("starcoder2", split_halves),
    on_a_gpu("qwen3moe", attention_alone),
    ("qwen2moe", attention_alone),
    ("gpt-oss", split_halves),
    on_a_gpu("qwen2moe", split_halves),
    on_a_gpu("granitemoe", split_halves),
    ("lfm2", mixed),
    ("qwen35", mixed),
    ("kimi-linear", mixed),
    ("granitehybrid", mixed),
    ("falcon-h1", mixed),
    on_a_gpu("falcon-h1", split_halves),
    ("command-r", mixed),
    ("falcon-40b", mixed),
    ("gptneox", split_halves),
    ("mpt-positions", mixed),
    ("phi2", cut(1)),
    ("nemotron_h", mixed),
    ("mamba", mixed),
    ("deepseek2", mixed),
    on_a_gpu("deepseek2-lite", attention_alone),
    ("bailingmoe2", mixed),
    ("jamba-moe", mixed),
    ("afmoe", mixed),
    ("step35", mixed),
    ("llama4 experts", split_halves),
    ("afmoe experts", split_halves),
    ("afmoe experts", attention_alone),
    ("gemma4-moe", split_halves),
    on_a_gpu("gemma4-moe", attention_alone),
    on_a_gpu("gemma4-moe", mixed),
    ("nemotron_h", split_halves),
    ("nemotron_h_moe", split_halves),
    ("nemotron_h_moe-latent", split_halves),
    ("nemotron_h_moe-latent", attention_alone),
    on_a_gpu("nemotron_h_moe-latent", mixed),
    on_a_gpu("nemotron_h", attention_alone),
    ("smallthinker", mixed),
    ("smallthinker", split_halves),
    ("mimo2", mixed),
    ("mimo2", split_halves),
    on_a_gpu("mimo2", attention_alone),
    ("bitnet-scales", mixed),
    ("bitnet", attention_alone),
    ("gemma4-per-layer", attention_alone),
    ("gemma4-per-layer", every_second),
]


def model_for(name: str, split_rule: Divide) -> RandomModel:
    model = MODELS[name]
    if split_rule is not split_halves or model.experts:
        return model
    return replace(model, feed_forward=1280 if HAS_GPU else 160, formats=("Q8_0", "Q4_0", "F16"))


FOUR_KINDS = {
    "gemma3": (0, 1, 4, 5),
    "gemma4": (0, 1, 2, 3),
    "mimo2": (0, 1, 2, 3),
    "smallthinker": (0, 1, 2, 3),
}
"""Four layers for the four kinds of `mixed`, one of which attends to more than a window."""


def layers_for(name: str, split_rule: Divide) -> tuple[int, ...]:
    """The evaluated layers, all if none is named; where kernels are interpreted, the relevant ones."""
    if HAS_GPU:
        return ()
    if split_rule is mixed:
        return FOUR_KINDS.get(name, ())
    return (0, 1) if split_rule is attention_alone or MODELS[name].experts else ()


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("name", "split_rule"), CASES)
def test_a_prompt_and_steps_equal_the_unsplit_logits(
    device: str, kernels: Kernels, tmp_path: Path, name: str, split_rule: Divide
) -> None:
    with opened(model_for(name, split_rule), tmp_path, layers_for(name, split_rule)) as decoder:
        splits = [split_rule(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(15)
        with split_decoder(decoder, device, splits, kernels, threads=2) as backend:
            result = read_split(backend, ids, (10, 1, 3, 1))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


STREAMED = [
    on_a_gpu("llama", split_halves),
    ("llama", mixed),
    on_a_gpu("starcoder2", mixed),
    ("starcoder2", attention_alone),
    ("gemma3", mixed),
    ("gemma4", mixed),
    ("lfm2", mixed),
    ("qwen35", mixed),
    ("kimi-linear", mixed),
    ("falcon-h1", mixed),
    ("command-r", mixed),
    ("falcon-40b", mixed),
    ("mpt-positions", mixed),
    ("nemotron_h", mixed),
    ("mamba", mixed),
    ("deepseek2 dense", mixed),
    ("jamba-moe", mixed),
    ("afmoe experts", split_halves),
    ("gemma4-moe", split_halves),
    ("llama4 experts", split_halves),
    ("step35", mixed),
    ("bitnet-scales", mixed),
    ("gemma4-per-layer", every_second),
    ("nemotron_h_moe", split_halves),
    ("nemotron_h_moe-latent", split_halves),
    on_a_gpu("qwen2moe", attention_alone),
    ("qwen2moe", split_halves),
    ("gpt-oss", split_halves),
    on_a_gpu("smallthinker", split_halves),
]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("name", "split_rule"), STREAMED)
def test_a_prompt_with_streamed_weights_equals_the_unsplit_logits(
    device: str, kernels: Kernels, tmp_path: Path, name: str, split_rule: Divide
) -> None:
    with opened(model_for(name, split_rule), tmp_path, layers_for(name, split_rule)) as decoder:
        splits = [split_rule(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(22)
        with split_decoder(decoder, device, splits, kernels, stream_min_tokens=6) as backend:
            result = read_split(backend, ids, (10, 6, 5, 1))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split_rule"), [("factors", mixed), ("factors of experts", split_halves)])
def test_streamed_weights_have_the_factors_of_their_matrices(
    device: str, nvfp4_kernels: Kernels, tmp_path: Path, name: str, split_rule: Divide
) -> None:
    """Four layers round more than two: on the CPU alone the logits differ by 0.08."""
    with opened(MODELS[name], tmp_path, layers_for(name, split_rule)) as decoder:
        splits = [split_rule(decoder, index) for index in range(len(decoder.weights.layers))]
        ids = decoder.ids(22)
        with split_decoder(decoder, device, splits, nvfp4_kernels, stream_min_tokens=6) as backend:
            result = read_split(backend, ids, (10, 6, 5, 1))
        assert worst(result, decoder.reference_logits(ids)) < 2 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "granitemoe"])
def test_steps_of_every_token_count_equal_the_unsplit_logits(
    device: str, kernels: Kernels, tmp_path: Path, name: str
) -> None:
    with opened(model_for(name, split_halves), tmp_path, layers_for(name, split_halves)) as decoder:
        splits = [split_halves(decoder, index) for index in range(len(decoder.weights.layers))]
        widths = tuple(range(1, 9)) if HAS_GPU else (1, 2, 5)
        ids = decoder.ids(sum(widths))
        with split_decoder(decoder, device, splits, kernels) as backend:
            result = read_split(backend, ids, widths)
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


@pytest.mark.slow
def test_a_device_without_in_graph_synchronization_synchronizes_between_launches(
    device: str, kernels: Kernels, tmp_path: Path
) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder:
        splits = [mixed(decoder, index) for index in range(3)]
        ids = decoder.ids(6)
        with split_decoder(decoder, device, splits, kernels, meets_in_graph=False) as backend:
            result = read_split(backend, ids, (1, 3, 2))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


def test_device_samples_are_those_of_the_logits(device: str, kernels: Kernels, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder:
        splits = [mixed(decoder, index) for index in range(len(decoder.weights.layers))]
        with split_decoder(decoder, device, splits, kernels) as backend:
            x = backend.embed(decoder.ids(4))
            backend.forward(x, 0)
            token = int(backend.logits(x[-1:])[0].argmax())
            for start in range(4, 6):
                chosen = backend.sample_next(token, start)
                again = backend.embed([token])
                backend.forward(again, start)
                assert chosen == int(backend.logits(again)[0].argmax())
                token = chosen


@pytest.mark.slow
def test_the_host_reports_its_expert_request_counts(device: str, kernels: Kernels, tmp_path: Path) -> None:
    with opened(ZOO["granitemoe"], tmp_path, layers_for("granitemoe", split_halves)) as decoder:
        count = len(decoder.weights.layers)
        for split_rule, expected in ((attention_alone, 1.0), (split_halves, None)):
            splits = [split_rule(decoder, index) for index in range(count)]
            with split_decoder(decoder, device, splits, kernels) as backend:
                read_split(backend, decoder.ids(12), (10, 1, 1))
                seen, here = backend.expert_counts
            assert seen == 12 * count * 3
            assert here == seen if expected else 0 < here < seen


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rwkv7", "time mixings read values of the first layer"),
        ("gemma4-per-layer", "layers read keys, values or inputs of other layers.*5 of 6 layers"),
        ("gemma3n", "layers read keys, values or inputs of other layers"),
    ],
)
def test_a_model_that_needs_one_device_is_not_split(
    device: str, kernels: Kernels, tmp_path: Path, name: str, message: str
) -> None:
    with opened(ZOO[name], tmp_path) as decoder:
        splits = [CPU_ONLY, *[ATTENTION_ONLY] * (len(decoder.weights.layers) - 1)]
        with pytest.raises(ValueError, match=message), split_decoder(decoder, device, splits, kernels):
            pass


@pytest.mark.parametrize(
    ("name", "message"),
    [("bitnet", "a norm of its neurons can't be split"), ("gemma3", "a post-norm can't be")],
)
def test_a_feed_forward_with_a_norm_is_on_one_device(
    device: str, kernels: Kernels, tmp_path: Path, name: str, message: str
) -> None:
    with opened(ZOO[name], tmp_path, (0,)) as decoder:
        splits = [LayerSplit(True, neurons=32)]
        expected = rf"blk\.0\.ffn_up\.weight: a feed-forward with {message}"
        with pytest.raises(ValueError, match=expected), split_decoder(decoder, device, splits, kernels):
            pass


def test_hidden_states_on_the_cpu_have_no_logits(device: str, kernels: Kernels, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path) as decoder:
        splits = [cut(1)(decoder, index) for index in range(3)]
        with split_decoder(decoder, device, splits, kernels) as backend:
            with pytest.raises(ValueError, match="have not passed the layers"):
                backend.logits(backend.embed([1, 2]))
            with pytest.raises(ValueError, match="17 tokens in one step"):
                backend.embed(list(range(17)))
