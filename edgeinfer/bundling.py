"""Writes a model's neurons as bundles, from which `run` reads the active ones if memory is too small."""

from collections.abc import Mapping
from pathlib import Path

from edgeinfer.errors import SettingError
from edgeinfer.model_config.support import open_model
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.registry.registry import find_model
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.compiler.features import choose
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels, load_kernels
from edgeinfer_kernels.cpu.sparse import dense_layer, why_unbundled
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_offload.runtime.bundle_file import write_bundles


def bundle_neurons(model: str | Path) -> Path:
    """Write the neurons of a model, a name or a path, as bundles next to its file; returns their path.

    Raises:
        SettingError: its activation is never zero, or a format has no layout by neuron.
        UnknownModelError, FormatError, OSError: it can't be read, or the bundles can't be written.
    """
    model_file = find_model(model)
    with open_model(model_file.path, model_file.name) as file:
        config = read_config(file)
        spec, weights = config.specification(), read_weights(file, config)
        return write_bundles(file.path, bundled_layers(spec, weights, model_file.name), _kernels())


def bundled_layers(spec: DecoderSpec, weights: DecoderWeights, name: str) -> Mapping[int, FeedForwardWeights]:
    """The feed-forwards that can be read by neurons. Raises `SettingError`: none can."""
    reasons = {layer: why_unbundled(spec, weights, layer) for layer in range(len(spec.layers))}
    able = {layer: dense_layer(weights, layer) for layer, reason in reasons.items() if reason is None}
    if not able:
        raise SettingError(f"bundle: no layer of {name} can be read by neurons: {reasons[0]}")
    return able


def _kernels() -> Kernels:
    return load_kernels(user_folder("cache"), choose(), [])
