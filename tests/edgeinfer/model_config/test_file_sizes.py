"""A file's index alone gives the sizes that reading its weights gives, MoE models included."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.file_sizes import file_sizes
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer_kernels.blocks.attention import AttentionSizes
from edgeinfer_kernels.blocks.moe import MoeSizes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.edgeinfer.conftest import ZooFile
from tests.model_zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_sizes_from_the_index_are_those_of_the_weights(zoo_file: ZooFile, name: str) -> None:
    with GGUFFile.open(zoo_file(name)) as file:
        config = read_config(file)
        read = ModelSizes.of(config.specification(), read_weights(file, config))
        result = file_sizes(file, config)
    assert result == read
    assert result.nbytes == read.nbytes


WIDTH, HIDDEN, EXPERTS = 256, 128, 6


def write_moe(path: Path, shapes: Mapping[str, tuple[int, ...]] = {}, **keys: Any) -> Path:
    """A MoE model of two layers; `shapes` adds or changes tensors of a layer, () omits one."""
    layer: dict[str, tuple[int, ...]] = {
        "attn_q": (256, WIDTH),
        "attn_k": (64, WIDTH),
        "attn_v": (64, WIDTH),
        "attn_output": (WIDTH, 256),
        "ffn_gate_inp": (EXPERTS, WIDTH),
        "ffn_gate_exps": (EXPERTS, HIDDEN, WIDTH),
        "ffn_up_exps": (EXPERTS, HIDDEN, WIDTH),
        "ffn_down_exps": (EXPERTS, WIDTH, HIDDEN),
        **shapes,
    }
    metadata = {
        "general.architecture": "mixture",
        "mixture.block_count": 2,
        "mixture.attention.head_count": 8,
        "mixture.attention.head_count_kv": 2,
        "mixture.attention.key_length": 32,
        "mixture.expert_count": EXPERTS,
        "mixture.expert_used_count": 2,
        "mixture.context_length": 512,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    with GGUFWriter(path, metadata) as writer:
        writer.add_tensor("token_embd.weight", np.zeros((64, WIDTH), np.float32), "Q8_0")
        writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32), "F32")
        for index in range(2):
            writer.add_tensor(f"blk.{index}.attn_norm.weight", np.ones(WIDTH, np.float32), "F32")
            writer.add_tensor(f"blk.{index}.ffn_norm.weight", np.ones(WIDTH, np.float32), "F32")
            for name, shape in layer.items():
                if shape:
                    kind = "F32" if name == "ffn_gate_inp" else "Q4_0"
                    writer.add_tensor(f"blk.{index}.{name}.weight", np.zeros(shape, np.float32), kind)
    return path


def sizes_of(path: Path) -> ModelSizes:
    with GGUFFile.open(path) as file:
        return file_sizes(file, None)


def test_an_moe_model_has_its_experts_and_its_router(tmp_path: Path) -> None:
    path = write_moe(tmp_path / "mixture.gguf")
    result = sizes_of(path)
    assert len(result.layers) == 2
    layer = result.layers[0]
    attention, experts = layer.blocks
    assert isinstance(attention, AttentionSizes)
    assert isinstance(experts, MoeSizes)
    assert attention.spec.head_shape == (8, 2, 32)
    assert (experts.granules, experts.granules_per_token) == (EXPERTS, 2)
    assert [m.rows for m in experts.granule_matrices()] == [HIDDEN, HIDDEN, WIDTH]
    assert experts.shared is None
    assert attention.vectors == experts.vectors == (WIDTH,)
    with GGUFFile.open(path) as file:
        vectors = sum(info.nbytes for info in file.tensors.values() if len(info.shape) == 1)
        assert result.nbytes == file.nbytes - vectors


def test_a_shared_expert_and_fused_gates_are_found(tmp_path: Path) -> None:
    shared = {"ffn_gate_shexp": (512, WIDTH), "ffn_up_shexp": (512, WIDTH), "ffn_down_shexp": (WIDTH, 512)}
    fused = {"ffn_gate_up_exps": (EXPERTS, 2 * HIDDEN, WIDTH), "ffn_gate_exps": (), "ffn_up_exps": ()}
    layer = sizes_of(write_moe(tmp_path / "model.gguf", {**shared, **fused})).layers[1]
    experts = layer.blocks[1]
    assert isinstance(experts, MoeSizes)
    assert experts.shared is not None
    assert experts.shared.neurons == 512
    assert [m.rows for m in experts.granule_matrices()] == [HIDDEN, HIDDEN, WIDTH]


@pytest.mark.parametrize(
    ("shapes", "keys", "text"),
    [
        ({"attn_q": ()}, {}, r"blk\.0\.attn_q\.weight is missing: mixture isn't built of attention"),
        ({"ffn_up_exps": ()}, {}, r"blk\.0\.ffn_up_exps\.weight is missing"),
        ({}, {"mixture__expert_used_count": 9}, r"mixture\.expert_count: 6, wanted that of"),
        ({}, {"mixture__block_count": 0}, r"mixture\.block_count: 0, wanted 1 to 4096"),
        ({}, {"mixture__block_count": "two"}, r"mixture\.block_count: two, wanted a whole number"),
        ({}, {"mixture__attention__head_count": 0}, r"head_count: 0, wanted heads in every layer"),
    ],
)
def test_an_unsupported_file_is_named_by_the_plan(
    tmp_path: Path, shapes: Mapping[str, tuple[int, ...]], keys: Mapping[str, Any], text: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        sizes_of(write_moe(tmp_path / "model.gguf", shapes, **keys))
