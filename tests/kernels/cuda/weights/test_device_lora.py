"""LoRA adapters on a GPU against the reference with merged weights: steps, prompts, and what is refused."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer_kernels.lora.weights import LoraError, LoraWeights, ModelLora
from edgeinfer_kernels.matrix import Matrix
from tests.kernels.cuda.decoders import FLOATS_AGREE, Decoder, distances, opened, read
from tests.kernels.cuda.test_cuda_backend import QUANTIZED, QUANTS_AGREE
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

COUNTS = [3, 16, 1, 2, 1]
MODELS: dict[str, tuple[RandomModel, tuple[int, ...]]] = {
    "floats": (ZOO["llama"], (0,)),
    "quantized": (replace(ZOO["llama"], formats=QUANTIZED), (0,)),
    "norms after blocks": (ZOO["gemma2"], (0,)),
    "no gate, biases": (replace(ZOO["starcoder2"], formats=QUANTIZED), (0,)),
    "norms before the last projections": (ZOO["bitnet"], (0,)),
    "shared experts": (ZOO["qwen2moe"], (0,)),
    "quantized experts": (replace(ZOO["qwen3moe"], formats=QUANTIZED), (0,)),
    "biases of experts": (ZOO["gpt-oss"], (0,)),
    "latent projection": (ZOO["nemotron_h_moe-latent"], (1,)),
    "experts without gates": (ZOO["llama4"], (1,)),
    "short convolution": (ZOO["lfm2"], (0,)),
}
UNADAPTED = ("conv.weight",)


def random_lora(decoder: Decoder, rank: int = 5) -> ModelLora:
    random = np.random.default_rng(4)
    adapters = {}
    for matrix in decoder.weights.matrices():
        if matrix is decoder.weights.token_embd or any(part in matrix.name for part in UNADAPTED):
            continue
        experts, columns = matrix.experts, matrix.columns
        a = random.standard_normal((experts, rank, columns), np.float32) / np.float32(columns**0.5)
        b = random.standard_normal((experts, matrix.rows, rank), np.float32) * np.float32(0.3)
        adapters[id(matrix)] = LoraWeights(matrix.name, a, b)
    table = decoder.weights.token_embd
    if table is decoder.weights.output:
        return ModelLora(adapters)
    a = random.standard_normal((1, rank, table.columns), np.float32) / np.float32(table.columns**0.5)
    b = random.standard_normal((1, table.rows, rank), np.float32)
    return ModelLora(adapters, LoraWeights(table.name, a, b))


def merged(value: Any, adapters: Mapping[int, LoraWeights]) -> Any:
    """Weights with the adapters in their matrices."""
    if isinstance(value, Matrix):
        if id(value) not in adapters:
            return value
        lora = adapters[id(value)]
        dense = value.decoded() + np.matmul(lora.b, lora.a).reshape(-1, value.columns)
        raw = np.ascontiguousarray(dense, np.float32).view(np.uint8)
        return Matrix(value.name, "F32", value.rows, value.columns, raw, value.experts)
    if isinstance(value, tuple):
        return tuple(merged(each, adapters) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: merged(getattr(value, f.name), adapters) for f in fields(value) if f.init}
        )
    return value


def all_of(decoder: Decoder, lora: ModelLora) -> dict[int, LoraWeights]:
    """The adapters of matrices and that of the embedding, by the id of the matrix."""
    rows = {} if lora.embedding is None else {id(decoder.weights.token_embd): lora.embedding}
    return {**lora.matrices, **rows}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_add_what_merged_weights_do(device: str, tmp_path: Path, name: str) -> None:
    model, layers = MODELS[name]
    with opened(model, tmp_path, layers) as decoder:
        ids, lora = decoder.ids(sum(COUNTS)), random_lora(decoder)
        plain = decoder.reference_logits(ids)
        whole = merged(decoder.weights, all_of(decoder, lora))
        expected = Decoder(decoder.specification, whole).reference_logits(ids)
        backend = decoder.backend(device)
        try:
            limit = FLOATS_AGREE if model.formats == ("F32",) else QUANTS_AGREE
            backend.set_lora(lora)
            assert max(distances(read(backend, ids, COUNTS), expected)) < limit
            assert max(distances(read(backend, ids, COUNTS), plain)) > 0.1
            backend.set_lora(ModelLora())
            assert max(distances(read(backend, ids, COUNTS), plain)) < limit
        finally:
            backend.close()


def test_the_embedding_of_a_tied_model_has_an_adapter_and_the_head_has_none(
    device: str, tmp_path: Path
) -> None:
    with opened(replace(ZOO["llama"], tied=True), tmp_path, (0,)) as decoder:
        table, random, ids = decoder.weights.token_embd, np.random.default_rng(4), decoder.ids(sum(COUNTS))
        a, b = (random.standard_normal(shape) for shape in ((1, 3, table.columns), (1, table.rows, 3)))
        rows = LoraWeights(table.name, a.astype(np.float32), b.astype(np.float32))
        added = merged(table, {id(table): rows})
        whole = replace(decoder.weights, token_embd=added)
        backend = decoder.backend(device)
        backend.set_lora(ModelLora({}, rows))
        expected = Decoder(decoder.specification, whole).reference_logits(ids)
        assert max(distances(read(backend, ids, COUNTS), expected)) < FLOATS_AGREE
        backend.close()


def test_adapters_of_heads_that_are_multiplied_separately_are_refused(device: str, tmp_path: Path) -> None:
    with opened(ZOO["deepseek2"], tmp_path, (0,)) as decoder:
        backend = decoder.backend(device)
        try:
            matrix = next(each for each in decoder.weights.matrices() if ".attn_k_b." in each.name)
            a = np.zeros((matrix.experts, 2, matrix.columns), np.float32)
            b = np.zeros((matrix.experts, matrix.rows, 2), np.float32)
            with pytest.raises(LoraError, match=r"attn_k_b\.weight: its kernel on a GPU takes no adapter"):
                backend.set_lora(ModelLora({id(matrix): LoraWeights(matrix.name, a, b)}))
        finally:
            backend.close()
