"""Reads the adapters that options name: GGUF files, and folders of PEFT."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgeinfer.lora.adapter import Adapter, adapter_error
from edgeinfer.lora.binding import Scaled
from edgeinfer.lora.gguf_adapter import read_gguf_adapter
from edgeinfer.lora.peft_adapter import CONFIG, is_peft_folder, read_peft_adapter
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.options.lora_option import LoraChoice
from edgeinfer_quant_formats.errors import FormatError


def read_adapters(
    choices: Sequence[LoraChoice], config: ModelConfig, known: Sequence[Adapter] = ()
) -> list[Scaled]:
    """The adapters with their scales; those that are `known` aren't read again.

    Raises:
        AdapterError: a file that is no adapter of this model, or can't be read.
    """
    by_path = {adapter.path: adapter for adapter in known}
    return [(by_path.get(each.path) or read_adapter(each.path, config), each.scale) for each in choices]


def read_adapter(path: Path, config: ModelConfig) -> Adapter:
    """The adapter at a path. Raises `AdapterError`."""
    try:
        if path.is_dir():
            return _from_folder(path, config)
        return read_gguf_adapter(path, config.architecture)
    except FormatError as error:
        raise adapter_error(path, str(error).removeprefix(f"{path}: ")) from error
    except OSError as error:
        raise adapter_error(path, f"{error.strerror or error}; wanted a LoRA adapter") from error


def _from_folder(path: Path, config: ModelConfig) -> Adapter:
    """The adapter of a folder: of PEFT, or its only GGUF file."""
    if is_peft_folder(path):
        return read_peft_adapter(path, config)
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise adapter_error(path, f"a folder without {CONFIG}; name an adapter's file")
    return replace(read_gguf_adapter(files[0], config.architecture), path=path)
