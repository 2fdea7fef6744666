"""Quantized weights of folders keep their codes in GGUF formats, with the values of their schemes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.opening import open_folder
from edgeinfer.hugging_face.quantized_weights import e4m3_table
from tests.conftest import needs
from tests.edgeinfer.distances import distance
from tests.edgeinfer.hugging_face.random_folders import IDS, own_logits, random_model, write_folder

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = needs("transformers")
Tensors = dict[str, Any]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
GROUP = 64


def packed(codes: Any, bits: int = 4) -> Any:
    """Words of 32 bits along the last dimension, the lowest bits first."""
    count = 32 // bits
    shifts = torch.arange(0, 32, bits)
    words = codes.long().reshape(*codes.shape[:-1], -1, count) << shifts
    return (
        words.sum(-1)
        .to(torch.int64)
        .bitwise_and(0xFFFFFFFF)
        .sub(1 << 31)
        .bitwise_xor(-(1 << 31))
        .to(torch.int32)
    )


def codes_of(weight: Any, bits: int, zeros: bool, group: int = GROUP) -> tuple[Any, Any, Any]:
    """Codes (rows, columns), scales and zero points (rows, groups) of a weight, and its new values."""
    grouped = weight.reshape(weight.shape[0], -1, group)
    half = 1 << (bits - 1)
    if zeros:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = ((high - low) / (2 * half - 1)).half().float()
        zero = (-low / scales).round().clamp(0, 2 * half - 1)
    else:
        scales = (grouped.abs().amax(-1) / half).half().float()
        zero = torch.full_like(scales, half)
    codes = (grouped / scales[..., None] + zero[..., None]).round().clamp(0, 2 * half - 1)
    values = (codes - zero[..., None]) * scales[..., None]
    return codes.reshape(weight.shape), (scales, zero), values.reshape(weight.shape)


def gptq(weight: Any, bits: int = 4, zeros: bool = False) -> tuple[Tensors, Any]:
    codes, (scales, zero), values = codes_of(weight, bits, zeros)
    group = torch.arange(weight.shape[1]) // GROUP
    return {
        "qweight": packed(codes, bits).T.contiguous(),
        "qzeros": packed((zero - 1).T.contiguous(), bits).contiguous(),
        "scales": scales.T.half().contiguous(),
        "g_idx": group.int(),
    }, values


def awq(weight: Any) -> tuple[Tensors, Any]:
    codes, (scales, zero), values = codes_of(weight, 4, zeros=True)

    def words(rows: Any) -> Any:
        ordered = rows.reshape(rows.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return packed(ordered.reshape(rows.shape[0], -1)).contiguous()

    return {
        "qweight": words(codes.T.contiguous()),
        "qzeros": words(zero.T.contiguous()),
        "scales": scales.T.half().contiguous(),
    }, values


def pack(weight: Any, bits: int = 4, zeros: bool = False) -> tuple[Tensors, Any]:
    codes, (scales, zero), values = codes_of(weight, bits, zeros)
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = packed(zero.T.contiguous(), bits).T.contiguous()
    return tensors, values


def fp8(weight: Any, block: int = 0) -> tuple[Tensors, Any]:
    scale = weight.abs().amax() / 448
    if not block:
        scale = weight.abs().amax(1, keepdim=True) / 448
        low = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": low, "weight_scale": scale}, low.float() * scale
    parts = weight.reshape(-1, block, weight.shape[1] // block, block)
    scales = parts.abs().amax((1, 3)) / 448
    low = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (low.float() * scales[:, None, :, None]).reshape(weight.shape)
    return {"weight": low.reshape(weight.shape), "weight_scale_inv": scales}, values


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(bits: int, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": GROUP,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


Maker = Callable[[Any], tuple[Tensors, Any]]
SCHEMES: dict[str, tuple[dict[str, Any], Maker, str, float]] = {
    "gptq": (GPTQ, gptq, "Q4_0", 1e-6),
    "gptq-8-bits": ({**GPTQ, "bits": 8}, lambda weight: gptq(weight, 8), "Q8_0", 1e-6),
    "gptq-zeros": ({**GPTQ, "sym": False}, lambda weight: gptq(weight, 4, True), "Q4_1", 6e-4),
    "awq": (AWQ, awq, "Q4_1", 6e-4),
    "compressed": (compressed(4, True), pack, "Q4_0", 1e-6),
    "compressed-8-bits": (compressed(8, True), lambda weight: pack(weight, 8), "Q8_0", 1e-6),
    "compressed-zeros": (compressed(4, False), lambda weight: pack(weight, 4, True), "Q4_1", 6e-4),
    "fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized",
         "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        fp8, "F16", 3e-4,
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda weight: fp8(weight, 32), "F16", 3e-4
    ),
}  # fmt: skip
"""Name -> quantization_config, the parts of a weight and its values, GGUF format, largest distance."""


def quantized_folder(folder: Path, name: str) -> tuple[Path, dict[str, npt.NDArray[np.float32]]]:
    """A folder whose matrices in layers are quantized, and a folder-wide map of their values."""
    config, make, _, _ = SCHEMES[name]
    write_folder(random_model("llama", attention_bias=False, **SIZES), folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    values: dict[str, npt.NDArray[np.float32]] = {}
    for full in [full for full in tensors if full.endswith("_proj.weight")]:
        parts, dense = make(tensors.pop(full).float())
        values[full] = dense.numpy()
        module = full.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    safetensors.save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors"
    )
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    return folder, values


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_matrices_have_the_values_of_their_scheme(tmp_path: Path, name: str) -> None:
    folder, values = quantized_folder(tmp_path / "model", name)
    _, _, kind, limit = SCHEMES[name]
    with open_folder(folder) as file:
        for full, gguf in (("v_proj", "attn_v"), ("down_proj", "ffn_down")):
            info = file.tensors[f"blk.1.{gguf}.weight"]
            part = "self_attn" if "attn" in gguf else "mlp"
            expected = values[f"model.layers.1.{part}.{full}.weight"]
            assert info.format.name == kind
            assert distance(file.decode(info.name), expected) < limit
        q = values["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 16, -1).swapaxes(1, 2)
        assert distance(file.decode("blk.0.attn_q.weight"), q.reshape(128, -1)) < limit


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", ["gptq", "fp8-blocks", "awq"])
def test_quantized_folders_run_and_convert(tmp_path: Path, name: str) -> None:
    folder, _ = quantized_folder(tmp_path / "model", name)
    edgeinfer.convert(folder, tmp_path / "out.gguf")
    logits = own_logits(folder)
    assert np.isfinite(logits).all()
    assert np.array_equal(logits, own_logits(tmp_path / "out.gguf"))
    assert logits.shape == (len(IDS), 288)


def test_the_codes_of_fp8_have_the_values_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(e4m3_table(), codes.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": ({**GPTQ, "bits": 3}, "3 bits, wanted 4 bits, or 8 without zero points"),
    "method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', wanted gptq, awq, fp8 or"),
    "group": ({**GPTQ, "group_size": 24}, "groups of 24 columns, wanted a multiple of 32"),
    "version": ({**AWQ, "version": "gemv"}, "AWQ of version 'gemv', wanted gemm"),
    "format": (
        {**compressed(4, True), "format": "marlin-24"},
        "compressed-tensors of format 'marlin-24', wanted",
    ),
    "groups": ({**compressed(4, True), "config_groups": {}}, "0 config_groups, wanted one for all matrices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_schemes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    config, message = REFUSED[name]
    folder, _ = quantized_folder(tmp_path / "model", "gptq")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
    with pytest.raises(UnsupportedModelError) as caught:
        own_logits(folder)
    assert f"quantization_config: {message}" in str(caught.value)


def test_activation_order_is_refused_by_the_name_of_the_matrix(tmp_path: Path) -> None:
    folder, _ = quantized_folder(tmp_path / "model", "gptq")
    tensors = safetensors.load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    safetensors.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError) as caught:
        own_logits(folder)
    assert "mlp.up_proj: its columns are in activation order (desc_act)" in str(caught.value)
