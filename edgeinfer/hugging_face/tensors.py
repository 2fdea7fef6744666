"""The tensors of a folder under their GGUF names, in the layout of GGUF."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import shortened
from edgeinfer.hugging_face.errors import folder_error
from edgeinfer.hugging_face.families.family import Family, by_part, plain_name, rope_pairs
from edgeinfer.hugging_face.quantized_weights import WeightsError, quantized, scheme_of
from edgeinfer.hugging_face.stored import Stored, stacked
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.safetensors.sharded import ShardedTensors

FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
IN_F32 = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "position_embd")
"""Matrices that GGUF files have in float32."""
IGNORED = re.compile(
    r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$|\.[kv]_scale$"
)
"""Tables that are computed, and scales of caches."""


class FolderTensors:
    """Finds and lays out the tensors of one folder.

    Raises:
        FolderError: a tensor that the family doesn't have, or an unsupported type.
    """

    def __init__(
        self, folder: Path, family: Family, config: Mapping[str, Any], tensors: ShardedTensors
    ) -> None:
        self._folder, self._family, self._config, self._tensors = folder, family, config, tensors
        try:
            self._scheme = scheme_of(config)
        except (WeightsError, ValueError, TypeError) as error:
            raise folder_error(folder, f"quantization_config: {error}") from error
        self._experts: defaultdict[str, dict[int, Stored]] = defaultdict(dict)

    def found(self) -> dict[str, Stored]:
        """GGUF name -> tensor, in the order of the folder's files."""
        result: dict[str, Stored] = {}
        for module, suffixes in self._modules().items():
            for suffix, stored in self._parts(module, suffixes):
                name = self._family.gguf_name(module)
                if name is None:
                    raise folder_error(
                        self._folder,
                        f"tensor {shortened(module)}.{shortened(suffix)}: "
                        f"{self._family.architecture} has no such tensor",
                    )
                full = f"{name}.{suffix}" if suffix else name
                expert = self._family.expert(module)
                if expert is not None:
                    self._experts[full][expert] = stored
                else:
                    result |= self._laid_out(full, stored)
        for full, parts in self._experts.items():
            result[full] = self._stack(full, parts)
        if self._config.get("tie_word_embeddings"):
            result.pop("output.weight", None)
        return result

    def _modules(self) -> dict[str, list[str]]:
        """Module -> the suffixes of its tensors."""
        modules: dict[str, list[str]] = {}
        for name in self._tensors.tensors:
            if IGNORED.search(name) or name.startswith(self._family.skipped):
                continue
            module, _, suffix = plain_name(name).rpartition(".")
            if self._family.gguf_name(f"{module}.{suffix}"):  # a tensor without a suffix
                module, suffix = f"{module}.{suffix}", ""
            modules.setdefault(module, []).append(suffix)
        return modules

    def _parts(self, module: str, suffixes: list[str]) -> list[tuple[str, Stored]]:
        """The weight and the bias of a module."""
        left = [suffix for suffix in suffixes if suffix not in self._scheme.parts]
        parts = [] if not self._is_quantized(module, suffixes) else [("weight", self._quantized(module))]
        if parts:
            left = [suffix for suffix in left if suffix != "weight"]
        return parts + [(suffix, self._stored(module, suffix)) for suffix in left]

    def _is_quantized(self, module: str, suffixes: list[str]) -> bool:
        if self._scheme.method == "fp8":
            return any(suffix.startswith("weight_scale") for suffix in suffixes)
        return self._scheme.method != "none" and self._scheme.marker in suffixes

    def _quantized(self, module: str) -> Stored:
        try:
            return quantized(module, self._tensors.array, self._tensors.tensors, self._scheme)
        except (WeightsError, KeyError) as error:
            raise folder_error(self._folder, f"tensor {shortened(str(error))}") from error

    def _stored(self, module: str, suffix: str) -> Stored:
        """A tensor of floats."""
        name = self._file_name(f"{module}.{suffix}" if suffix else module)
        info = self._tensors.tensors[name][1]
        if info.dtype not in FLOATS or not info.shape or 0 in info.shape:
            raise folder_error(
                self._folder,
                f"tensor {shortened(name)}: {info.dtype} of shape {info.shape}, wanted F32, F16 or BF16",
            )
        kind = block_format(FLOATS[info.dtype])
        return Stored(info.shape, kind, lambda: self._tensors.array(name).reshape(-1).view(np.uint8), name)

    def _file_name(self, plain: str) -> str:
        names = self._tensors.tensors
        if plain in names:
            return plain
        inner = plain.removeprefix("model.")
        others = (f"language_model.model.{inner}", f"model.language_model.{inner}", f"language_model.{plain}")
        return next(other for other in others if other in names)

    def _stack(self, name: str, parts: Mapping[int, Stored]) -> Stored:
        count = len(parts)
        first = next(iter(parts.values()))
        same = all(part.shape == first.shape and part.format == first.format for part in parts.values())
        if sorted(parts) != list(range(count)) or not same:
            raise folder_error(
                self._folder, f"tensor {name}: {count} experts of which one is missing or of another shape"
            )
        return stacked([parts[index] for index in range(count)])

    def _laid_out(self, full: str, stored: Stored) -> dict[str, Stored]:
        """The tensor as GGUF has it, or the two that it becomes."""
        base = full.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
        try:
            changed = self._changed(base, full, stored)
        except ValueError as error:
            raise folder_error(
                self._folder, f"tensor {full}: shape {stored.shape} doesn't fit the config: {error}"
            ) from error
        if isinstance(changed, tuple):
            gate, up = changed
            return {full: gate, full.replace("ffn_gate_exps", "ffn_up_exps"): up}
        if len(changed.shape) == 1 or base in IN_F32:
            changed = changed.as_f32()
        return {full: changed}

    def _changed(self, base: str, full: str, stored: Stored) -> Stored | tuple[Stored, Stored]:
        family, config = self._family, self._config
        layout = family.layouts.get(base)
        if family.permuted and base in ("attn_q", "attn_k"):
            kv = config.get("num_key_value_heads") or config["num_attention_heads"]
            heads = config["num_attention_heads"] if base == "attn_q" else kv
            return stored.reordered(rope_pairs(stored.shape[0], heads))
        if family.norm_offset and full.endswith("norm.weight"):
            return stored.computed(stored.shape, lambda values: values + family.norm_offset, "F32")
        if layout == "query_key_value_by_head":
            return stored.reordered(by_part(stored.shape[0], config["num_attention_heads"]))
        if layout == "transposed" and full.endswith(".weight"):
            rows, columns = stored.shape
            return stored.computed((columns, rows), lambda values: values.T)
        if layout == "negative_exp":
            return stored.computed(stored.shape, lambda values: -np.exp(values), "F32")
        if layout == "squeezed" and len(stored.shape) == 3:
            return stored.reshaped((stored.shape[0], stored.shape[2]))
        if layout == "gate_up_experts":
            return _halves(stored)
        if base == "ffn_gate_inp_shexp":
            return stored.reshaped((stored.shape[-1],))
        return stored


def _halves(stored: Stored) -> tuple[Stored, Stored]:
    """The first and the last half of the rows of each expert."""
    experts, rows, columns = stored.shape
    half = rows // 2

    def part(first: int) -> Stored:
        def load() -> Any:
            raw = stored.load().reshape(experts, rows, -1)
            return np.ascontiguousarray(raw[:, first : first + half])

        return Stored((experts, half, columns), stored.format, load)

    return part(0), part(half)
