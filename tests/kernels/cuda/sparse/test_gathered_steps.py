"""Models on a GPU whose steps read only active neurons give the logits of the reference."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.compiler.kernel_units import SERVICE, kernel_units
from edgeinfer_kernels.cpu.sparse import SparseLayers
from edgeinfer_kernels.cuda.device_parts import DeviceOptions, count_parts
from edgeinfer_kernels.lora.weights import LoraError, LoraWeights, ModelLora
from edgeinfer_kernels.sizes import cuda_buffers
from edgeinfer_kernels.sizes.gathered_neurons import gathering_bytes, why_not_gathered
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from tests.kernels.conftest import BEST, built_kernels
from tests.kernels.cuda.decoders import CONTEXT, Decoder, opened, read, worst
from tests.kernels.cuda.offload.test_split_backend import TOLERANCE, read_split
from tests.kernels.cuda.split_decoders import CPU_ONLY, device_layer, split_decoder
from tests.kernels.cuda.test_cuda_backend import QUANTS_AGREE
from tests.kernels.split_layers import LayerSplit
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

RELU = {"hidden_activation": "relu"}
MODELS: dict[str, RandomModel] = {
    "gated": replace(ZOO["llama"], width=128, feed_forward=1024, layers=2, extra=RELU),
    "squared, without a gate": replace(ZOO["arcee"], width=128, feed_forward=768, layers=2),
    "layer norms and biases": replace(ZOO["nemotron"], width=128, feed_forward=512, layers=2),
    "drelu": replace(
        ZOO["llama"], width=128, feed_forward=512, layers=1, extra={"hidden_activation": "drelu"}
    ),
}


def feed_forwards(decoder: Decoder) -> list[tuple[FeedForwardSpec, FeedForwardWeights]]:
    """The specification and weights of each feed-forward."""
    spec, weights = decoder.specification, decoder.weights
    found = [(spec.residual(index).block, weights.residual(index).block) for index in spec.indices()]
    return [(block, w) for block, w in found if isinstance(block, FeedForwardSpec)]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default_cases(1)
def test_prompts_and_steps_equal_the_reference(device: str, tmp_path: Path, name: str, kind: str) -> None:
    model = MODELS[name] if kind != "Q4_K" else replace(MODELS[name], width=256)
    with opened(replace(model, formats=(kind,)), tmp_path) as decoder:
        assert [why_not_gathered(*each) for each in feed_forwards(decoder)] == [None] * model.layers
        ids = decoder.ids(15)
        backend = decoder.backend(device, gathered=tuple(range(model.layers)))
        result = read(backend, ids, (9, 1, 4, 1))
        again = read(backend, ids[14:], (1,), start=14)
        backend.close()
        assert np.array_equal(again[0], result[14])
        assert worst(result, decoder.reference_logits(ids)) < QUANTS_AGREE


def test_gathered_layers_take_no_adapter(device: str, tmp_path: Path) -> None:
    with opened(replace(MODELS["drelu"], formats=("Q8_0",)), tmp_path) as decoder:
        backend = decoder.backend(device, gathered=(0,))
        up = feed_forwards(decoder)[0][1].ffn_up
        a, b = (np.ones(shape, np.float32) for shape in ((1, 4, up.columns), (1, up.rows, 4)))
        one = ModelLora({id(up): LoraWeights(up.name, a, b)})
        with pytest.raises(LoraError, match="layers that read active neurons only"):
            backend.set_lora(one)
        backend.set_lora(ModelLora({}))
        backend.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.default_cases(1)
def test_the_gpu_part_of_a_split_feed_forward_gathers_too(device: str, tmp_path: Path, kind: str) -> None:
    with opened(replace(MODELS["gated"], layers=3, formats=(kind,)), tmp_path) as decoder:
        splits = [CPU_ONLY, LayerSplit(True, neurons=512), device_layer(decoder, 2)]
        sparse: SparseLayers = dict.fromkeys(range(3))
        units = kernel_units(decoder.weights, head=False, sparse=sparse)
        kernels, ids = built_kernels(BEST, [SERVICE, *units]), decoder.ids(14)
        with split_decoder(
            decoder, device, splits, kernels, stream_min_tokens=6, sparse=sparse, gathered=(1, 2)
        ) as backend:
            result = read_split(backend, ids, (8, 1, 4, 1))
        assert worst(result, decoder.reference_logits(ids)) < TOLERANCE


def test_gathered_layers_take_the_bytes_of_planes_and_the_counted_buffers(tmp_path: Path) -> None:
    with opened(replace(MODELS["gated"], formats=("Q4_0",)), tmp_path) as decoder:
        spec, weights = decoder.specification, decoder.weights
        sizes, cpu = ModelSizes.of(spec, weights), torch.device("cpu")
        dense = count_parts(spec, weights, CONTEXT, cpu)
        gathered = count_parts(spec, weights, CONTEXT, cpu, DeviceOptions(gathered=(0, 1)))
        assert [part.name for part in dense] == [part.name for part in gathered]
        buffers = gathered[-1].nbytes - dense[-1].nbytes
        assert buffers == gathering_bytes(1024, 128)
        assert cuda_buffers.workspace_bytes(sizes, CONTEXT) == dense[-1].nbytes
        for one, other in zip(dense[:-1], gathered[:-1], strict=True):
            assert one.nbytes - 512 <= other.nbytes <= one.nbytes


def test_the_reason_is_given_why_neurons_are_not_gathered(tmp_path: Path) -> None:
    cases = {
        "it is F32; gathered are Q4_0": replace(MODELS["gated"], formats=("F32",)),
        "has 64 rows, wanted a multiple of 128": replace(MODELS["gated"], width=64, formats=("Q8_0",)),
        "its activation is silu": replace(ZOO["llama"], formats=("Q8_0",)),
    }
    for reason, model in cases.items():
        with opened(model, tmp_path) as decoder:
            assert reason.removeprefix("it ") in (why_not_gathered(*feed_forwards(decoder)[0]) or "")
