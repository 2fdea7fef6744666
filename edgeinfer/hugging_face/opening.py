"""Opens a Hugging Face folder as a model: config.json, safetensors and tokenizer.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.hugging_face.errors import folder_error
from edgeinfer.hugging_face.families.family import Family
from edgeinfer.hugging_face.families.table import FAMILIES
from edgeinfer.hugging_face.folder_file import FolderFile
from edgeinfer.hugging_face.json_files import read_json
from edgeinfer.hugging_face.medusa_folder import is_medusa_folder, open_medusa
from edgeinfer.hugging_face.powerinfer_file import PowerInferFile, is_powerinfer
from edgeinfer.hugging_face.settings import model_metadata, text_config
from edgeinfer.hugging_face.stored import Stored, of_values
from edgeinfer.hugging_face.tensors import FolderTensors
from edgeinfer.hugging_face.tokenizer.special_tokens import special_metadata
from edgeinfer.hugging_face.tokenizer.vocabulary import vocabulary_metadata
from edgeinfer.user_folders import user_folder
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.safetensors.sharded import INDEX, SINGLE, ShardedTensors

CONFIG = "config.json"


def is_model_folder(folder: Path) -> bool:
    """Whether a folder has a config.json and safetensors, of a model or of Medusa heads."""
    has_tensors = (folder / SINGLE).is_file() or (folder / INDEX).is_file() or is_medusa_folder(folder)
    return (folder / CONFIG).is_file() and has_tensors


def open_file(path: Path, *, unknown_types: bool = False) -> GGUFFile:
    """The model at a path: a GGUF file, one of PowerInfer, or a folder. `unknown_types`: as for
    `GGUFFile.open`.

    Raises:
        FolderError: a folder that isn't supported. FormatError, OSError: it can't be read.
    """
    if path.is_dir():
        return open_folder(path)
    file = GGUFFile.open(path, unknown_types=unknown_types)
    return PowerInferFile(file, _spill_folder()) if is_powerinfer(file) else file


def _spill_folder() -> Path:
    """The folder of temporary files with computed tensors."""
    return user_folder("cache") / "folders"


def open_folder(folder: Path, *, in_memory: bool = False) -> FolderFile:
    """The model in a folder. `in_memory`: computed tensors stay in memory until they are released, instead
    of in a temporary file.

    Raises:
        FolderError: a family, a setting, a tensor or a tokenizer that isn't supported, or that is missing.
        FormatError, OSError: a file is damaged, or can't be read.
    """
    spill = None if in_memory else _spill_folder()
    if is_medusa_folder(folder):
        return open_medusa(folder, spill)
    given = read_json(folder, CONFIG)
    family = family_of(folder, given)
    config = text_config(given)
    tensors = ShardedTensors.open(folder)
    try:
        metadata, stored = _contents(folder, family, config, tensors)
        return FolderFile(folder, tensors, metadata, stored, spill)
    except (KeyError, TypeError, ValueError) as error:
        tensors.close()
        if isinstance(error, FormatError):
            raise
        raise folder_error(folder, f"{CONFIG}: {type(error).__name__} {shown(str(error))}") from error
    except BaseException:
        tensors.close()
        raise


def family_of(folder: Path, config: Mapping[str, Any]) -> Family:
    """The family of a folder's model. Raises `FolderError`: an unknown one."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise folder_error(
            folder,
            f"{CONFIG}: architecture {shown(name)} isn't one of the {len(FAMILIES)} that folders may have "
            "(docs/user/convert.md lists them); take a GGUF file of the model",
        )
    return family


def _contents(
    folder: Path, family: Family, config: Mapping[str, Any], tensors: ShardedTensors
) -> tuple[dict[str, Any], dict[str, Stored]]:
    """The metadata and the tensors."""
    stored = FolderTensors(folder, family, config, tensors).found()
    embedding = stored.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise folder_error(folder, "no embedding of tokens, wanted a language model")
    keys, factors = model_metadata(folder, family, config)
    tokenizer = read_json(folder, "tokenizer.json")
    vocabulary = vocabulary_metadata(folder, tokenizer, embedding.shape[0])
    special = special_metadata(folder, config, tokenizer, vocabulary["tokenizer.ggml.tokens"])
    metadata = {
        "general.type": "model",
        "general.name": folder.resolve().name,
        **keys,
        **vocabulary,
        **special,
    }
    stored |= {name: of_values(values) for name, values in factors.items()}
    return metadata, stored
