"""Checks whether the native engine supports a model, from its file's header, before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.weights import is_head_file, read_config, read_weights
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec
from edgeinfer_kernels.cpu.compiler.kernel_units import kernel_formats
from edgeinfer_kernels.cpu.layout.packed_matrix import UnsupportedFormatError
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import UnsupportedTypeError, printable
from edgeinfer_quant_formats.formats import missing_format_error

NEEDS_LLAMA_CPP = "needs --engine llama.cpp"


@dataclass(frozen=True)
class ModelSupport:
    """`reason`: why the native engine can't run it; empty: supported. `is_model` False: no engine can."""

    reason: str = ""
    is_model: bool = True

    @property
    def is_native(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if not self.is_model:
            return f"nothing: {self.reason}"
        return "edgeinfer" if self.is_native else f"{NEEDS_LLAMA_CPP}: {self.reason}"


def model_support(file: GGUFFile) -> ModelSupport:
    """Whether the native engine supports the architecture, the tensors, their types and the tokenizer."""
    for name, info in file.tensors.items():
        if not info.format.is_known:
            reason = missing_format_error(info.format.type_id)
            return ModelSupport(_shortened(f"tensor {printable(name)}: {reason}"))
    if file.has_text("general.type", "adapter"):
        return ModelSupport("it is a LoRA adapter, for --lora", is_model=False)
    if is_head_file(file):
        return ModelSupport("it is a draft head, for --draft of its model", is_model=False)
    try:
        config = read_config(file)
        kernel_formats(read_weights(file, config))
        Tokenizer.check(file.metadata)
    except (UnsupportedModelError, UnsupportedFormatError) as error:
        return ModelSupport(_shortened(str(error)))
    return ModelSupport()


def header_support(metadata: Mapping[str, Any]) -> ModelSupport:
    """As `model_support`, for the architecture and the tokenizer only."""
    try:
        config_from_metadata(metadata, len(metadata.get("tokenizer.ggml.tokens", ())))
        Tokenizer.check(metadata)
    except UnsupportedModelError as error:
        return ModelSupport(_shortened(str(error)))
    return ModelSupport()


def recurrent_layers(file: GGUFFile) -> dict[str, int]:
    """Of a model with recurrent layers: the layers with a recurrent state and with attention, and the bytes
    of the state, which are the same for any context. Empty for other models.
    """
    try:
        spec = read_config(file).specification().with_slots()
    except UnsupportedModelError:
        return {}
    if not spec.is_recurrent:
        return {}
    shapes = [[each.block.recurrent for each in layer.blocks] for layer in spec.layers]
    kinds = AttentionSpec, LatentAttentionSpec
    attention = [any(isinstance(each.block, kinds) for each in layer.blocks) for layer in spec.layers]
    return {
        "recurrent layers": sum(any(layer) for layer in shapes),
        "attention layers": sum(attention),
        "recurrent state bytes": sum(shape.nbytes for layer in shapes for shape in layer if shape),
    }


def open_model(path: Path, name: str) -> GGUFFile:
    """The open file of a model.

    Raises:
        UnsupportedModelError: it has an unknown tensor type.
        FormatError, OSError: it can't be read.
    """
    try:
        return open_file(path)
    except UnsupportedTypeError as error:
        raise UnsupportedModelError(f"{name}: {support_of(path)}") from error


def open_listed(path: Path) -> GGUFFile:
    """The open file of a model of any tensor types, for listing it: see `GGUFFile.open`.

    Raises:
        FormatError, OSError: it can't be read.
    """
    return open_file(path, unknown_types=True)


def support_of(path: Path) -> ModelSupport:
    """As `model_support`, for a local file.

    Raises:
        FormatError, OSError: it can't be read.
    """
    try:
        with open_file(path) as file:
            return model_support(file)
    except UnsupportedTypeError as error:
        return unsupported_type(error, path)


def unsupported_type(error: UnsupportedTypeError, path: Path) -> ModelSupport:
    """The result for a file with an unknown tensor type."""
    return ModelSupport(_shortened(str(error).removeprefix(f"{path}: ")))


def _shortened(reason: str) -> str:
    """A reason without the suggested solution, which is always the same."""
    return reason.partition("; ")[0].partition("; engine=")[0].rstrip(".")
