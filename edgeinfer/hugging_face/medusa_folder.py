"""A folder of Medusa heads in the published layout: config.json and medusa_lm_head.safetensors.

Tensors of head i: `i.0.linear.weight` and `.bias`, a residual layer, and `i.1.weight`, the output matrix.
Some files have the prefix `medusa_head`.
"""

from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import shortened, shown
from edgeinfer.hugging_face.errors import folder_error
from edgeinfer.hugging_face.folder_file import FolderFile
from edgeinfer.hugging_face.json_files import read_json
from edgeinfer.hugging_face.stored import Stored
from edgeinfer.hugging_face.tensors import FLOATS
from edgeinfer.model_config.layers.medusa_heads import MAX_HEADS
from edgeinfer.model_config.weights import HEAD_FILE_TYPE, MEDUSA
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.safetensors.reader import SafetensorsFile
from edgeinfer_quant_formats.safetensors.sharded import ShardedTensors

HEADS = "medusa_lm_head.safetensors"
PARTS = {
    "0.linear.weight": "medusa_linear.weight",
    "0.linear.bias": "medusa_linear.bias",
    "1.weight": "medusa_output.weight",
}
"""The tensors of a head, and their names in GGUF."""


def is_medusa_folder(folder: Path) -> bool:
    """Whether a folder has Medusa heads."""
    return (folder / HEADS).is_file()


def open_medusa(folder: Path, spill: Path | None) -> FolderFile:
    """The heads of a folder as a GGUF file. `spill`: as for `FolderFile`.

    Raises:
        FolderError: a setting or a tensor that isn't supported, or that is missing.
        FormatError, OSError: a file is damaged, or can't be read.
    """
    config = read_json(folder, "config.json")
    tensors = ShardedTensors([SafetensorsFile(folder / HEADS)])
    try:
        stored = _stored(folder, config, tensors)
        return FolderFile(folder, tensors, _metadata(folder, config, stored), stored, spill)
    except BaseException:
        tensors.close()
        raise


def _stored(folder: Path, config: dict[str, Any], tensors: ShardedTensors) -> dict[str, Stored]:
    """GGUF name -> tensor."""
    layers = config.get("medusa_num_layers", 1)
    if layers != 1:
        raise folder_error(
            folder, f"medusa_num_layers: saw {shown(layers)}, wanted 1 residual layer of a head"
        )
    count = config.get("medusa_num_heads")
    if type(count) is not int or not 1 <= count <= MAX_HEADS:
        raise folder_error(folder, f"medusa_num_heads: saw {shown(count)}, wanted 1 to {MAX_HEADS} heads")
    names = {name.removeprefix("medusa_head."): name for name in tensors.tensors}
    wanted = {f"{head}.{part}": f"blk.{head}.{own}" for head in range(count) for part, own in PARTS.items()}
    for name in sorted({*names, *wanted}):
        if name not in wanted or name not in names:
            problem = "is missing" if name in wanted else "belongs to none of the heads"
            raise folder_error(folder, f"tensor {shortened(name)} {problem}, wanted those of {count} heads")
    return {own: _tensor(folder, tensors, names[name]) for name, own in wanted.items()}


def _tensor(folder: Path, tensors: ShardedTensors, name: str) -> Stored:
    info = tensors.tensors[name][1]
    dimensions = 1 if name.endswith("bias") else 2
    if info.dtype not in FLOATS or len(info.shape) != dimensions or 0 in info.shape:
        raise folder_error(
            folder, f"tensor {shortened(name)}: {info.dtype} of shape {info.shape}, wanted F32, F16 or BF16"
        )
    kind = block_format(FLOATS[info.dtype])
    found = Stored(info.shape, kind, lambda: tensors.array(name).reshape(-1).view(np.uint8), name)
    return found.as_f32() if dimensions == 1 else found


def _metadata(folder: Path, config: dict[str, Any], stored: dict[str, Stored]) -> dict[str, Any]:
    rows, width = stored["blk.0.medusa_output.weight"].shape
    return {
        "general.architecture": MEDUSA,
        "general.type": HEAD_FILE_TYPE,
        "general.name": folder.resolve().name,
        f"{MEDUSA}.head_count": config["medusa_num_heads"],
        f"{MEDUSA}.embedding_length": width,
        f"{MEDUSA}.vocabulary_size": rows,
    }
