"""What an encoder's file has besides a decoder's: rows for the embeddings; and the activations of files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer_kernels.blocks.feed_forward import Activation

if TYPE_CHECKING:
    from edgeinfer.model_config.weights import FileTensors

Array = npt.NDArray[np.float32]


def position_rows(tensors: "FileTensors", config: ModelConfig) -> Array | None:
    """(positions, hidden_size): what is added to the embeddings of a text, by position; None: nothing.

    Raises `UnsupportedModelError`: a missing or misshapen tensor.
    """
    encoder, width = config.architecture_spec.encoder, config.width
    if encoder is None:
        return None
    rows = np.zeros((1, width), np.float32)
    if encoder.learned_positions:
        found = tensors.matrix("position_embd.weight", (config.trained_context, width))
        if found is None:
            raise tensors.missing("position_embd.weight")
        rows = np.zeros((1, width), np.float32) if tensors.shapes_only else found.decoded()
    types = tensors.info("token_types.weight") if encoder.token_types else None
    if types is None:
        return rows if encoder.learned_positions else None
    found = tensors.matrix("token_types.weight", (*types.shape[:-1], width))
    assert found is not None
    return rows if tensors.shapes_only else rows + found.decoded_rows(np.array([0]))


RELU_NAMES: Mapping[str, Activation] = {
    "relu": "relu",
    "relu2": "relu_squared",
    "relu_squared": "relu_squared",
    "drelu": "drelu",
}
"""Names of `hidden_activation` with which a decoder differs from others of its architecture."""


def with_file_activation(config: ModelConfig, metadata: Mapping[str, Any]) -> ModelConfig:
    """The config with the activation that the file names: of an encoder, or a ReLU of a decoder (ReluLLaMA,
    ProSparse, TurboSparse). Raises `UnsupportedModelError`: an unknown one of an encoder.
    """
    spec, key = config.architecture_spec, f"{config.architecture}.hidden_activation"
    name = metadata.get(key)
    if spec.encoder is None:
        named = RELU_NAMES.get(name, spec.activation) if isinstance(name, str) else spec.activation
        return replace(config, architecture_spec=replace(spec, activation=named))
    if name is None:
        return config
    if name not in ("gelu", "silu"):
        raise UnsupportedModelError(f"{key}: saw {name!r}, wanted 'gelu' or 'silu'")
    return replace(config, architecture_spec=replace(spec, activation=name))
