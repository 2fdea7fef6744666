"""Miniature models whose formats are compared with llama.cpp's; run it to store llama.cpp's selections.

python -m tests.quant_formats.mix_models      (needs llama-cpp-python)
"""

import ctypes
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer_quant_formats import GGUFWriter
from edgeinfer_quant_formats.quantizer.mixes import MIXES, find_mix

CHOICES = Path(__file__).parent / "goldens" / "llama_cpp_choices.json"
# One character per format, so that the selections for a model are a short text.
SIGNS = {
    "F32": "f", "F16": "h", "BF16": "b", "Q4_0": "p", "Q4_1": "q", "Q5_0": "r", "Q5_1": "s", "Q8_0": "v",
    "Q2_K": "B", "Q3_K": "C", "Q4_K": "D", "Q5_K": "E", "Q6_K": "F", "IQ4_NL": "n", "IQ4_XS": "x",
    "IQ3_S": "j", "IQ3_XXS": "k", "IQ2_S": "l", "IQ2_XS": "w", "IQ2_XXS": "y", "IQ1_M": "i", "IQ1_S": "g",
    "MXFP4": "m", "TQ1_0": "t", "TQ2_0": "u", "Q1_0": "o",
}  # fmt: skip
VOCABULARY = 48
# [   1/ 200]   output.weight   - [  256,    48,     1,     1], type =    f32, size = 1 MiB -> 1 MiB (q6_K)
TENSOR_LINE = re.compile(r"/ *\d+\] (\S+) +- \[[ \d,]+\], type = +(\w+), size =[^\n]*?(?:\((\w+)\))?\n")

LAYER = re.compile(r"^blk\.(\d+)\.")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class MixModel:
    """A model of an architecture: its metadata, and tensors of the right names with few rows."""

    architecture: str
    layers: int
    width: int = 256
    hidden: int = 512
    heads: int = 8
    key_heads: int | list[int] = 8
    tied: bool = False
    experts: int = 0
    fused: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    in_layer: tuple[tuple[str, tuple[int, ...]], ...] = ()
    extra_tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def metadata(self) -> dict[str, Any]:
        spec = {
            "context_length": 64, "embedding_length": self.width, "block_count": self.layers,
            "feed_forward_length": self.hidden, "attention.head_count": self.heads,
            "attention.head_count_kv": self.key_heads, "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.layer_norm_epsilon": 1e-5, **self.more,
        }  # fmt: skip
        if self.experts:
            spec |= {"expert_count": self.experts, "expert_used_count": 2}
        return {"general.architecture": self.architecture} | {
            f"{self.architecture}.{key}": value for key, value in spec.items()
        }

    def shapes(self) -> Shapes:
        """Tensor names and shapes, (rows, columns), in an order that is not llama.cpp's."""
        shapes: Shapes = {"token_embd.weight": (VOCABULARY, self.width), "output_norm.weight": (self.width,)}
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self._layer()}
        shapes |= dict(self.extra_tensors)
        return shapes if self.tied else shapes | {"output.weight": (VOCABULARY, self.width)}

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide, deep = (4, self.width), (4, self.hidden)
        yield "attn_norm.weight", (self.width,)
        if self.fused:
            yield from (("attn_qkv.weight", wide), ("attn_qkv.bias", (4,)))
        else:
            yield from ((f"attn_{part}.weight", wide) for part in ("q", "k", "v"))
            yield "attn_q.bias", (4,)
        yield from (("attn_output.weight", wide), ("ffn_norm.weight", (self.width,)))
        if self.experts:
            yield "ffn_gate_inp.weight", (self.experts, self.width)
            yield from ((f"ffn_{part}_exps.weight", (self.experts, *wide)) for part in ("up", "gate"))
            yield "ffn_down_exps.weight", (self.experts, *deep)
        else:
            yield from (("ffn_up.weight", wide), ("ffn_down.weight", deep))
            if not self.fused:
                yield "ffn_gate.weight", wide
        yield from self.in_layer

    def write(self, path: Path, shapes: Shapes | None = None) -> Path:
        """The model as a file of F32 tensors of random weights."""
        random = np.random.default_rng(61)
        with GGUFWriter(path, self.metadata()) as writer:
            for name, shape in (shapes or self.shapes()).items():
                writer.add_tensor(name, random.standard_normal(shape).astype(np.float32), "F32")
        return path


_POST_NORMS = (("post_attention_norm.weight", (256,)), ("post_ffw_norm.weight", (256,)))
_SHARED_EXPERT = (("ffn_up_shexp.weight", (4, 256)), ("ffn_down_shexp.weight", (4, 512)))
_LATENT = (
    ("attn_q_a.weight", (4, 256)), ("attn_q_b.weight", (4, 256)), ("attn_kv_a_mqa.weight", (4, 256)),
    ("attn_kv_b.weight", (4, 256)), ("attn_k_b.weight", (2, 4, 64)), ("attn_v_b.weight", (2, 4, 256)),
)  # fmt: skip
_LATENT_FACTS = {
    "attention.q_lora_rank": 256, "attention.kv_lora_rank": 256, "leading_dense_block_count": 1,
    "expert_feed_forward_length": 512, "expert_shared_count": 1, "expert_weights_scale": 1.0,
}  # fmt: skip
_BERT_TENSORS = (("position_embd.weight", (64, 256)), ("token_types.weight", (2, 256)))
_PER_LAYER = (
    ("per_layer_token_embd.weight", (VOCABULARY, 512)),
    ("per_layer_model_proj.weight", (4, 256)),
    ("altup_proj.weight", (3, 4, 256)),
)
_LAUREL = (("laurel_l.weight", (4, 256)), ("altup_router.weight", (4, 256)), ("inp_gate.weight", (4, 256)))
_GEMMA3N_FACTS = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, False] * 4}

MODELS: Mapping[str, MixModel] = {
    "llama, heads in eights": MixModel("llama", 22, heads=32, key_heads=4),
    "llama, tied, heads in fours": MixModel("llama", 16, heads=32, key_heads=8, tied=True),
    "llama, heads alone": MixModel("llama", 33),
    "llama, three layers": MixModel("llama", 3, tied=True),
    "llama of 70B": MixModel("llama", 80, heads=64, key_heads=8),
    "llama of 65B": MixModel("llama", 80),
    "llama, eight experts": MixModel("llama", 9, heads=32, key_heads=8, experts=8),
    "llama, rows of 224": MixModel("llama", 9, width=224, hidden=608),
    "llama, tied, rows of 200": MixModel("llama", 9, width=200, hidden=512, tied=True),
    "qwen2, tied": MixModel("qwen2", 24, heads=14, key_heads=2, tied=True),
    "qwen2 of 70B": MixModel("qwen2", 80, heads=64, key_heads=8),
    "qwen3moe": MixModel("qwen3moe", 12, heads=32, key_heads=4, experts=16),
    "gemma2": MixModel("gemma2", 26, key_heads=4, tied=True, in_layer=_POST_NORMS,
                       more={"attention.sliding_window": 16}),
    "gemma3n": MixModel("gemma3n", 12, key_heads=2, tied=True, more=_GEMMA3N_FACTS, in_layer=_LAUREL,
                        extra_tensors=_PER_LAYER),
    "phi3, fused": MixModel("phi3", 32, fused=True),
    "falcon": MixModel("falcon", 32, heads=71, key_heads=1, fused=True),
    "falcon, tied": MixModel("falcon", 16, heads=71, key_heads=1, fused=True, tied=True),
    "deepseek2": MixModel("deepseek2", 10, heads=16, key_heads=16, experts=8, more=_LATENT_FACTS,
                          in_layer=_SHARED_EXPERT + _LATENT),
    "bert": MixModel("bert", 12, extra_tensors=_BERT_TENSORS, more={"attention.causal": False}),
    "arcee": MixModel("arcee", 10, key_heads=2),
}  # fmt: skip


def in_signs(formats: Mapping[str, str]) -> str:
    """Selections as a short text: a character each, by name without layer number, runs counted."""
    by_part = sorted(formats, key=lambda name: (LAYER.sub("", name), int((LAYER.findall(name) or [0])[0])))
    runs = (
        (sign, len(list(run))) for sign, run in itertools.groupby(SIGNS[formats[name]] for name in by_part)
    )
    return "".join(f"{sign}{count}" for sign, count in runs)


def by_llama_cpp(
    path: Path, mix: str, importance: Mapping[str, int] | None = None, **options: Any
) -> dict[str, str]:
    """The formats that llama.cpp's quantizer would give the tensors of a file; `options` are its parameters.

    A dry run writes nothing and logs a line for each tensor.
    """
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.dry_run = find_mix(mix).file_type, True
    for name, value in options.items():
        setattr(parameters, name, value)
    if importance is not None:
        entries = _importance_entries(importance)
        parameters.imatrix = ctypes.cast(entries, type(parameters.imatrix))
    log: list[bytes] = []
    callback = llama_cpp.llama_log_callback(lambda level, text, data: log.append(text))
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        failed = llama_cpp.llama_model_quantize(str(path).encode(), b"", ctypes.byref(parameters))
    finally:
        from llama_cpp import _logger

        llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))
    lines = b"".join(log).decode()
    if failed:
        raise RuntimeError(f"llama.cpp did not quantize {path} to {mix}: {lines[-300:]}")
    return {result[1]: (result[3] or result[2]).upper() for result in TENSOR_LINE.finditer(lines)}


def _importance_entries(columns: Mapping[str, int]) -> Any:
    """An importance of ones for every tensor, as llama.cpp's C structure."""
    import llama_cpp

    entry = llama_cpp.llama_model_imatrix_data
    entries = (entry * (len(columns) + 1))()
    for index, (name, count) in enumerate(columns.items()):
        entries[index].name = name.encode()
        entries[index].data = (ctypes.c_float * count)(*[1.0] * count)
        entries[index].size = count
    return entries


def columns_of(shapes: Shapes) -> dict[str, int]:
    """How many columns an importance has for each tensor, all matrices together."""
    return {name: int(np.prod(shape[:-2])) * shape[-1] for name, shape in shapes.items()}


def measure_llama_cpp(folder: Path, names: list[str]) -> dict[str, dict[str, list[str]]]:
    """For each model and mix the selected formats without an importance matrix and with one."""
    result: dict[str, dict[str, list[str]]] = {}
    for name in names:
        model = MODELS[name]
        path = model.write(folder / "model.gguf")
        importance = columns_of(model.shapes())
        result[name] = {}
        for mix in MIXES:
            try:
                given = in_signs(by_llama_cpp(path, mix, importance))
            except RuntimeError as error:
                # It has no fallback for rows that don't fill blocks of 128; edgeinfer's is F16.
                if "no tensor type fallback is defined" not in str(error):
                    raise
                result[name][mix] = []
                continue
            plain = in_signs(by_llama_cpp(path, mix))
            result[name][mix] = [plain] if plain == given else [plain, given]
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        choices = measure_llama_cpp(Path(temporary), list(MODELS))
    CHOICES.write_text(json.dumps(choices, indent=0) + "\n", encoding="utf-8")
