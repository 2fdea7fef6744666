"""Shapes have the sizes of the models they are named after."""

import pytest

from edgeinfer.benchmarking.random_files import metadata
from edgeinfer.errors import SettingError
from edgeinfer.model_config.layers.draft_head import read_draft_head
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.shapes.headers import matrix_formats, shape_header
from edgeinfer.shapes.known_shapes import SHAPES, find_shape
from edgeinfer_quant_formats import FormatError, block_format
from edgeinfer_quant_formats.quantizer.mixes import MIXES


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
        ("llama-3-8b", 8_030_261_248),
        ("olmoe-7b-a1b", 6_919_161_856),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("nemotron-3-nano-4b", 3_973_556_832),
    ],
)
def test_a_shape_has_the_published_parameter_count(name: str, parameters: int) -> None:
    assert find_shape(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "low", "high"), [("gemma4-e4b", 7.4e9, 8.0e9), ("gemma4-26b-a4b", 25.15e9, 25.25e9)]
)
def test_shapes_of_gemma_4_have_the_published_rounded_counts(name: str, low: float, high: float) -> None:
    # The published 8B of E4B include its encoders of images and sound.
    assert low < find_shape(name).parameters < high


def test_a_gemma_4_with_its_first_layers_shares_no_caches_and_has_their_per_layer_embeddings() -> None:
    shape = find_shape("gemma4-e4b:8")
    assert metadata(shape)["gemma4.attention.shared_kv_layers"] == 0
    assert metadata(find_shape("gemma4-e4b"))["gemma4.attention.shared_kv_layers"] == 18
    assert shape.matrices()["per_layer_token_embd.weight"] == (262144, 8 * 256)
    assert metadata(shape)["gemma4.attention.sliding_window_pattern"] == [True] * 5 + [False, True, True]


def test_an_unknown_shape_or_type_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"shape: saw 'llama', wanted one of \d+, as llama-3-8b, "):
        find_shape("llama")
    with pytest.raises(FormatError, match="type Q9 is unknown; wanted one of F32, F16"):
        matrix_formats(SHAPES["llama-3-8b"], "Q9")


def test_a_shape_can_have_fewer_layers() -> None:
    whole, cut = find_shape("qwen3.5-35b-a3b"), find_shape("qwen3.5-35b-a3b:8")
    assert (cut.name, cut.layers) == ("qwen3.5-35b-a3b-8-layers", 8)
    assert {
        name: shape for name, shape in whole.matrices().items() if name in cut.matrices()
    } == cut.matrices()
    for wrong in ("0", "41", "", "x"):
        with pytest.raises(SettingError, match=f"saw '{wrong}' layers of qwen3.5-35b-a3b, wanted 1 to 40"):
            find_shape(f"qwen3.5-35b-a3b:{wrong}")


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-35b-a3b", "llama-3.2-1b:4", "glm-4.7-flash"])
def test_a_shape_can_have_a_draft_head(name: str) -> None:
    plain, shape = find_shape(name), find_shape(f"{name}+mtp")
    file = shape_header(shape, "Q4_0")
    assert shape.name == f"{plain.name}+mtp"
    assert file.metadata[f"{shape.architecture}.block_count"] == plain.layers + 1
    config = read_config(file)
    assert (len(config.shapes), config.draft_heads) == (plain.layers, 1)
    tables = read_weights(file, config, shapes_only=True)
    head = read_draft_head(file, config, tables, shapes_only=True)
    own = sum(each.weights for block in head.sizes.blocks for each in block.matrices())
    added = shape.parameters - plain.parameters
    assert 0 <= added - own < 8 * shape.width + 1024
    assert head.spec.vocabulary_size == -(-plain.vocabulary // 32) * 16


def test_a_draft_head_needs_an_architecture_that_has_one() -> None:
    with pytest.raises(SettingError, match=r"gemma4-e4b\+mtp.*gemma4 has no known draft head"):
        find_shape("gemma4-e4b+mtp")


def test_q4_k_m_gives_the_usual_tensors_more_bits() -> None:
    formats = matrix_formats(find_shape("tinyllama-1.1b"), "q4_k_m")
    assert formats["output.weight"] == "Q6_K"
    assert formats["token_embd.weight"] == formats["blk.5.attn_q.weight"] == "Q4_K"
    wide = [layer for layer in range(22) if formats[f"blk.{layer}.ffn_down.weight"] == "Q6_K"]
    # The layers of TinyLlama's published Q4_K_M file.
    assert wide == [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]
    assert wide == [layer for layer in range(22) if formats[f"blk.{layer}.attn_v.weight"] == "Q6_K"]


def test_a_tied_embedding_has_the_format_of_the_head() -> None:
    formats = matrix_formats(find_shape("llama-3.2-1b"), "Q4_0")
    assert "output.weight" not in formats
    assert formats["token_embd.weight"] == "Q6_K"


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_fills_whole_blocks(name: str) -> None:
    shape = find_shape(name)
    for kind in MIXES:
        formats = matrix_formats(shape, kind)
        for matrix, size in shape.matrices().items():
            assert block_format(formats[matrix]).nbytes(size) > 0


def test_experts_have_the_formats_of_a_quantized_moe_model() -> None:
    formats = matrix_formats(find_shape("qwen3-30b-a3b"), "Q4_K_M")
    assert formats["blk.9.ffn_gate_inp.weight"] == "F32"
    assert formats["blk.9.ffn_up_exps.weight"] == "Q4_K"
    assert {formats[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(48)} == {"Q4_K", "Q6_K"}
    only_experts = matrix_formats(find_shape("granite-1b-a400m"), "MXFP4")
    assert only_experts["blk.0.ffn_down_exps.weight"] == "MXFP4"
    assert only_experts["blk.0.attn_q.weight"] == only_experts["token_embd.weight"] == "Q8_0"


def test_mxfp4_without_experts_is_mxfp4_but_for_the_head() -> None:
    formats = matrix_formats(SHAPES["llama-3-8b"], "MXFP4")
    assert formats.pop("output.weight") == "Q8_0"
    assert set(formats.values()) == {"MXFP4"}
    assert matrix_formats(SHAPES["llama-3.2-1b"], "MXFP4")["token_embd.weight"] == "Q8_0"
