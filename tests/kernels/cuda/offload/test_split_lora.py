"""LoRA adapters of a split model: each device adds what the adapters change in its part of the matrices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.lora.weights import LoraError, LoraWeights, ModelLora
from tests.kernels.cuda.decoders import Decoder, opened, worst
from tests.kernels.cuda.offload.test_split_backend import (
    Divide,
    attention_alone,
    layers_for,
    mixed,
    model_for,
    on_a_gpu,
    read_split,
    split_halves,
)
from tests.kernels.cuda.split_decoders import split_decoder
from tests.kernels.cuda.weights.test_device_lora import merged, random_lora
from tests.model_zoo import ZOO

COUNTS = (1, 12, 2)
WITHIN = 0.05


def with_embedding(decoder: Decoder, lora: ModelLora) -> tuple[ModelLora, Decoder]:
    """The adapters with one of the embedding, if the head is another matrix, and the decoder with all of them
    in its weights.
    """
    random, table = np.random.default_rng(6), decoder.weights.token_embd
    if decoder.weights.output is table:
        return lora, Decoder(decoder.specification, merged(decoder.weights, lora.matrices))
    a = random.standard_normal((1, 4, table.columns), np.float32) / np.float32(4)
    b = random.standard_normal((1, table.rows, 4), np.float32) / np.float32(4)
    whole = replace(lora, embedding=LoraWeights(table.name, a, b))
    adapters = {**lora.matrices, id(table): LoraWeights(table.name, a, b)}
    return whole, Decoder(decoder.specification, merged(decoder.weights, adapters))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("name", "divide"),
    [
        ("llama", split_halves),
        ("starcoder2", attention_alone),
        on_a_gpu("gemma3", mixed),
        pytest.param("qwen2moe", split_halves, marks=pytest.mark.slow),
        pytest.param("lfm2", mixed, marks=pytest.mark.slow),
    ],
)
def test_a_split_model_with_adapters_equals_merged_weights(
    device: str, tmp_path: Path, kernels: Kernels, name: str, divide: Divide
) -> None:
    with opened(model_for(name, divide), tmp_path, layers_for(name, divide)) as decoder:
        ids = decoder.ids(sum(COUNTS))
        plain = decoder.reference_logits(ids)
        lora, whole = with_embedding(decoder, random_lora(decoder))
        splits = [divide(decoder, index) for index in range(len(decoder.specification.layers))]
        with split_decoder(decoder, device, splits, kernels) as backend:
            assert backend.capabilities.takes_lora
            backend.set_lora(lora)
            result = read_split(backend, ids, COUNTS)
            assert worst(result, whole.reference_logits(ids)) < WITHIN
            assert worst(result, plain) > 0.1
            backend.set_lora(ModelLora())
            assert worst(read_split(backend, ids, COUNTS), plain) < WITHIN


def test_a_refused_adapter_changes_nothing_on_either_device(
    device: str, tmp_path: Path, kernels: Kernels
) -> None:
    with opened(ZOO["deepseek2"], tmp_path, (0,)) as decoder:
        ids, counts = decoder.ids(3), (3,)
        splits = [attention_alone(decoder, index) for index in range(len(decoder.specification.layers))]
        heads = next(each for each in decoder.weights.matrices() if "attn_k_b.weight" in each.name)
        experts, rows, columns = heads.experts, heads.rows, heads.columns
        ones = np.ones((experts, 2, columns), np.float32), np.ones((experts, rows, 2), np.float32)
        embedding = with_embedding(decoder, ModelLora())[0].embedding
        bad = ModelLora({id(heads): LoraWeights(heads.name, *ones)}, embedding)
        with split_decoder(decoder, device, splits, kernels) as backend:
            before = read_split(backend, ids, counts)
            with pytest.raises(LoraError, match=r"attn_k_b\.weight: its kernel on a GPU takes no adapter"):
                backend.set_lora(bad)
            np.testing.assert_array_equal(read_split(backend, ids, counts)[2], before[2])
