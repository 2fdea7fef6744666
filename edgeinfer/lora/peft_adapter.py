"""Reads a LoRA adapter from a folder of PEFT: adapter_config.json and adapter_model.safetensors.

The factor of b·a is lora_alpha / r, or lora_alpha / √r with rsLoRA.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import shortened, shown
from edgeinfer.hugging_face.errors import FolderError
from edgeinfer.hugging_face.families.family import Family, by_part, plain_name, rope_pairs
from edgeinfer.hugging_face.families.table import FAMILIES
from edgeinfer.hugging_face.json_files import read_json
from edgeinfer.hugging_face.quantized_weights import WeightsError, floats_of
from edgeinfer.lora.adapter import Adapter, AdapterTensor, Floats, adapter_error, checked_pair
from edgeinfer.model_config.config import ModelConfig
from edgeinfer_quant_formats.safetensors.reader import SafetensorsFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of lora_B",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained token indices",
    "target_parameters": "target_parameters",
}
"""Settings that change more than LoRA does, and how messages name them."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that change the weights of the model, so that the adapter belongs to other weights."""


def is_peft_folder(path: Path) -> bool:
    """Whether a path is a folder with an adapter."""
    return path.is_dir() and (path / CONFIG).is_file()


def read_peft_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """The adapter in a folder, for a model of this config.

    Raises:
        AdapterError: it is no LoRA, changes more than LoRA does, or has modules that the model doesn't have.
        FormatError, OSError: a file is damaged, or can't be read.
    """
    try:
        settings = read_json(folder, CONFIG)
    except FolderError as error:
        raise adapter_error(folder, str(error).removeprefix(f"{folder}: ")) from error
    _check(folder, settings)
    family = _family(folder, config.architecture)
    with SafetensorsFile(folder / WEIGHTS) as file:
        pairs = _pairs(folder, file)
        tensors = _tensors(folder, family, config, settings, pairs)
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes())
    digest.update((folder / CONFIG).read_bytes())
    return Adapter(folder, tensors, digest.hexdigest())


def _check(folder: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise adapter_error(folder, f"{CONFIG}: peft_type {shown(settings.get('peft_type'))}, wanted 'LORA'")
    for key, name in REFUSED.items():
        if settings.get(key):
            raise adapter_error(
                folder, f"{CONFIG}: {key} {shown(settings[key])}, wanted none: {name} aren't LoRA"
            )
    if settings.get("bias", "none") != "none":
        raise adapter_error(folder, f"{CONFIG}: bias {shown(settings['bias'])}, wanted 'none'")
    if settings.get("modules_to_save"):
        modules = shown(settings["modules_to_save"])
        raise adapter_error(
            folder, f"{CONFIG}: modules_to_save {modules}, wanted none: they are whole matrices"
        )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise adapter_error(
            folder,
            f"{CONFIG}: init_lora_weights {shown(start)} changes the model's weights; convert it to LoRA",
        )


def _family(folder: Path, architecture: str) -> Family:
    """All names of the families of an architecture."""
    families = [family for family in FAMILIES.values() if family.architecture == architecture]
    if not families:
        raise adapter_error(
            folder, f"the names of {architecture} in PEFT aren't known; take the adapter as a GGUF file"
        )
    first = families[0]
    ends, layer = dict(first.ends), dict(first.layer)
    for family in families[1:]:
        ends |= family.ends
        layer |= family.layer
    return Family(architecture, ends, layer, first.prefix, permuted=first.permuted, layouts=first.layouts)


Pairs = dict[str, dict[str, Floats]]


def _pairs(folder: Path, file: SafetensorsFile) -> Pairs:
    """Module -> its A and B."""
    listed = {name: (0, info) for name, info in file.tensors.items()}
    pairs: defaultdict[str, dict[str, Floats]] = defaultdict(dict)
    for name in file.tensors:
        match = PARTS.fullmatch(plain_name(name.removeprefix(PREFIX)))
        if match is None:
            raise adapter_error(folder, f"tensor {shortened(name)}: wanted lora_A and lora_B only")
        try:
            values = floats_of(file.array, listed, name)
        except WeightsError as error:
            raise adapter_error(folder, f"tensor {error}") from error
        pairs[match[1]][(match[2] or "") + match[3]] = values
    for module, found in pairs.items():
        if found.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise adapter_error(folder, f"tensor {shortened(module)}: one of lora_A and lora_B is missing")
    if not pairs:
        raise adapter_error(folder, f"{WEIGHTS}: no tensors, wanted pairs of lora_A and lora_B")
    return dict(pairs)


def _tensors(
    folder: Path, family: Family, config: ModelConfig, settings: Mapping[str, Any], pairs: Pairs
) -> dict[str, AdapterTensor]:
    """GGUF name -> what the adapter adds."""
    tensors: dict[str, AdapterTensor] = {}
    experts: defaultdict[str, dict[int, AdapterTensor]] = defaultdict(dict)
    for module, found in pairs.items():
        base = family.gguf_name(module)
        if base is None:
            raise adapter_error(
                folder, f"tensor {shortened(module)}: {family.architecture} has no such module in GGUF"
            )
        name = f"{base}.weight"
        if "A" in found:
            a, b = found["A"], found["B"]
        else:  # the rows of an embedding are those of lora_embedding_A, transposed
            a, b = found["embedding_B"].T, found["embedding_A"].T
        pair = checked_pair(folder, name, a, b)
        factor = _factor(folder, settings, module, pair.b.shape[-1])
        pair = AdapterTensor(pair.a, _laid_out(folder, family, config, name, pair.b) * np.float32(factor))
        if (expert := family.expert(module)) is not None:
            experts[name][expert] = pair
        else:
            tensors[name] = pair
    return tensors | {name: _stacked(folder, config, name, parts) for name, parts in experts.items()}


def _factor(folder: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r of a module, whose alpha may be given by a pattern."""
    alpha = _by_pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise adapter_error(folder, f"{CONFIG}: lora_alpha {shown(alpha)}, wanted a finite number")
    expected = _by_pattern(settings.get("rank_pattern"), module, settings.get("r"))
    if expected != rank:
        raise adapter_error(
            folder, f"tensor {shortened(module)}: rank {rank}, wanted {shown(expected)} as {CONFIG}"
        )
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that ends the module's name, as PEFT matches them."""
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if module == pattern or module.endswith(f".{pattern}") or _matches(pattern, module):
            return value
    return default


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(rf"(.*\.)?({pattern})$", module) is not None
    except re.error:
        return False


def _laid_out(folder: Path, family: Family, config: ModelConfig, name: str, b: Floats) -> Floats:
    """The rows of b in the order of the GGUF tensor."""
    if not name.startswith("blk."):
        return b
    _, number, base, _ = name.split(".")
    layer = int(number)
    if layer >= len(config.shapes):
        raise adapter_error(folder, f"tensor {name}: the model has {len(config.shapes)} layers")
    shape = config.shapes[layer]
    try:
        if family.permuted and base in ("attn_q", "attn_k"):
            return b[rope_pairs(len(b), shape.heads if base == "attn_q" else shape.kv_heads)]
        if family.layouts.get(base) == "query_key_value_by_head":
            return b[by_part(len(b), shape.heads)]
    except ValueError:
        raise adapter_error(
            folder, f"tensor {name}: {len(b)} rows don't fit the heads of the model"
        ) from None
    return b


def _stacked(
    folder: Path, config: ModelConfig, name: str, parts: Mapping[int, AdapterTensor]
) -> AdapterTensor:
    """One tensor of all experts; those that the adapter doesn't change are 0."""
    count = config.experts.count if config.experts else 0
    first = next(iter(parts.values()))
    same = all(part.a.shape == first.a.shape and part.b.shape == first.b.shape for part in parts.values())
    if max(parts) >= count or not same:
        raise adapter_error(
            folder, f"tensor {name}: {len(parts)} experts, wanted at most {count} of one shape and rank"
        )
    a, b = np.zeros((count, *first.a.shape), np.float32), np.zeros((count, *first.b.shape), np.float32)
    for expert, part in parts.items():
        a[expert], b[expert] = part.a, part.b
    return AdapterTensor(a, b)
