"""Mixes: for miniature models of many architectures the selected formats are llama.cpp's."""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgeinfer_quant_formats import FORMATS, FormatError
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.mix_rules import SourceModel
from edgeinfer_quant_formats.quantizer.mixes import ALIASES, MIXES, find_mix
from edgeinfer_quant_formats.quantizer.tensor_roles import OUTPUT, is_quantized
from edgeinfer_quant_formats.quantizer.type_selection import (
    Override,
    TypeOptions,
    TypeSelection,
    select_types,
    unmatched,
)
from tests.quant_formats import mix_models
from tests.quant_formats.mix_models import MODELS, MixModel, Shapes

GOLDEN = json.loads(mix_models.CHOICES.read_text(encoding="utf-8"))


def infos(shapes: Shapes, format: str = "F32") -> list[TensorInfo]:
    kind = FORMATS[format]
    return [TensorInfo(name, shape, kind, 0, kind.nbytes(shape), part=0) for name, shape in shapes.items()]


def choices(model: MixModel, mix: str, importance: bool = False, **options: Any) -> dict[str, TypeSelection]:
    tied = OUTPUT not in model.shapes()
    spec = SourceModel.from_metadata(model.metadata(), 0, has_importance=importance, tied_output=tied)
    return select_types(infos(model.shapes()), spec, find_mix(mix), TypeOptions(**options))


def formats(model: MixModel, mix: str, importance: bool = False, **options: Any) -> dict[str, str]:
    return {name: each.format.name for name, each in choices(model, mix, importance, **options).items()}


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_every_mix_selects_the_formats_of_llama_cpp(name: str) -> None:
    for mix in MIXES:
        stored = GOLDEN[name][mix]
        for expected, importance in ((stored[0], False), (stored[-1], True)) if stored else ():
            assert mix_models.in_signs(formats(MODELS[name], mix, importance)) == expected, (mix, importance)


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["llama, eight experts", "llama, rows of 224", "falcon, tied", "deepseek2"])
def test_the_stored_selections_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    assert mix_models.measure_llama_cpp(tmp_path, [name]) == {name: GOLDEN[name]}


@pytest.mark.llama_cpp
@pytest.mark.slow
def test_all_stored_selections_equal_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    assert mix_models.measure_llama_cpp(tmp_path, list(MODELS)) == GOLDEN


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["llama, three layers", "llama, rows of 224", "gemma3n", "falcon"])
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0", "F16"])
def test_options_have_the_effect_that_they_have_in_llama_cpp(name: str, mix: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = MODELS[name].write(tmp_path / "model.gguf")
    overrides = (llama_cpp.llama_model_tensor_override * 3)()
    overrides[0].pattern, overrides[0].type = b"blk\\.[0-1]\\.ffn_up", FORMATS["Q8_0"].type_id
    overrides[1].pattern, overrides[1].type = b"ffn|per_layer", FORMATS["Q6_K"].type_id
    ours = tuple(
        Override(re.compile(each.pattern.decode()), FORMATS[format])
        for each, format in zip(overrides, ("Q8_0", "Q6_K"), strict=False)
    )
    for theirs, actual in (
        ({"pure": True}, {"pure": True}),
        ({"output_tensor_type": 0}, {"output": FORMATS["F32"]}),
        ({"token_embedding_type": 8}, {"embedding": FORMATS["Q8_0"]}),
        ({"tt_overrides": ctypes.cast(overrides, ctypes.c_void_p)}, {"overrides": ours}),
    ):
        if mix == "F16" and "overrides" in actual:
            continue  # llama.cpp ignores the user's overrides there
        options: dict[str, Any] = dict(theirs)
        if "tt_overrides" in options:
            kind = type(llama_cpp.llama_model_quantize_default_params().tt_overrides)
            options["tt_overrides"] = ctypes.cast(overrides, kind)
        expected = mix_models.by_llama_cpp(path, mix, **options)
        assert formats(MODELS[name], mix, **actual) == expected, actual


def test_rows_with_partial_blocks_use_the_fallback() -> None:
    chosen = choices(MODELS["llama, rows of 224"], "Q4_K_M")
    query, value = chosen["blk.4.attn_q.weight"], chosen["blk.0.attn_v.weight"]
    assert (query.format.name, query.requested.name) == ("Q5_0", "Q4_K")
    assert (value.format.name, value.requested.name) == ("Q8_0", "Q6_K")
    assert formats(MODELS["llama, tied, rows of 200"], "Q4_K_M")["blk.0.attn_q.weight"] == "F16"


def test_norms_biases_routers_and_position_tables_are_never_quantized() -> None:
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight"):
        assert not is_quantized(name, (4, 256), "llama")
    assert not is_quantized("blk.0.attn_q.bias", (4, 256), "llama")
    assert not is_quantized("blk.0.attn_q.weight", (1, 256), "llama")
    assert is_quantized("blk.0.attn_q.weight", (4, 256), "llama")


def test_overrides_apply_to_float_mixes_too() -> None:
    override = Override(re.compile("attn_q"), FORMATS["Q8_0"])
    result = formats(MODELS["arcee"], "F16", overrides=(override,))
    assert (result["blk.0.attn_q.weight"], result["blk.0.attn_k.weight"]) == ("Q8_0", "F16")


def test_a_pattern_without_a_match_is_reported() -> None:
    patterns = tuple(Override(re.compile(text), FORMATS["Q8_0"]) for text in ("attn_q", "attn_norm", "nose"))
    tensors = {info.name: info for info in infos(MODELS["arcee"].shapes())}
    assert unmatched(patterns, tensors, "arcee") == ["attn_norm", "nose"]


def test_a_requested_format_that_rows_cannot_fill_is_refused() -> None:
    expected = r"token_embd.weight: row of 224 weights is not a multiple of the Q4_K block \(256\)"
    with pytest.raises(FormatError, match=expected):
        choices(MODELS["llama, rows of 224"], "Q8_0", embedding=FORMATS["Q4_K"])


def test_a_layer_that_the_metadata_do_not_count_is_refused() -> None:
    spec = SourceModel("llama", layers=2, experts=4)
    tensors = infos({"blk.2.ffn_down_exps.weight": (4, 4, 256)})
    with pytest.raises(FormatError, match=r"blk\.2\.ffn_down_exps\.weight: layer 2, wanted 0 to 1"):
        select_types(tensors, spec, find_mix("Q4_K_M"))


def test_mixes_are_found_in_any_case_and_by_their_short_names() -> None:
    assert find_mix("q4_k_m") is MIXES["Q4_K_M"]
    assert all(find_mix(short) is MIXES[name] for short, name in ALIASES.items())
    with pytest.raises(FormatError, match="type Q9_Z is unknown; wanted one of F32, F16, BF16, Q8_0"):
        find_mix("Q9_Z")


def test_file_types_are_numbered_once() -> None:
    assert len({mix.file_type for mix in MIXES.values()}) == len(MIXES)


def test_counts_that_are_not_numbers_are_refused() -> None:
    metadata = {"general.architecture": "llama", "llama.block_count": "many"}
    with pytest.raises(FormatError, match=r"llama\.block_count: many, wanted a whole number"):
        SourceModel.from_metadata(metadata, 1, has_importance=False, tied_output=False)


def test_the_manual_lists_every_mix() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "user" / "quantize.md").read_text(encoding="utf-8")
    assert [mix for mix in MIXES if f"`{mix}`" not in manual] == []
