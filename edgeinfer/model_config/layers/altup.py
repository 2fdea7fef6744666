"""The config of Gemma 3n: AltUp's streams, Laurel, and feed-forwards with few active neurons."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import Activation, FeedForwardSpec
from edgeinfer_kernels.blocks.gemma3n.altup_correct import AltUpCorrectSpec
from edgeinfer_kernels.blocks.gemma3n.altup_predict import AltUpPredictSpec
from edgeinfer_kernels.blocks.gemma3n.gaussian_feed_forward import GaussianFeedForwardSpec
from edgeinfer_kernels.blocks.gemma3n.laurel import LaurelSpec
from edgeinfer_kernels.blocks.layer_output import LayerOutputSpec
from edgeinfer_kernels.decoder import LayerSpec, ResidualBlock

DEFAULT_STREAMS, MAX_STREAMS = 4, 16
DEFAULT_PER_LAYER_WIDTH = 256
LAUREL_RANK = 64
"""No file has another one, nor a key for it."""
DEFAULT_SPARSE_LAYERS, DEFAULT_DEVIATIONS = 10, 1.6448533535003662
"""Of files without `activation_sparsity_scale`: the first layers have 5 % active neurons."""
LAYERS_WITH_CACHES = 20
"""Of files without `attention.shared_kv_layers`; later layers share those caches."""


@dataclass(frozen=True)
class AltUpConfig:
    """`deviations`: of each layer, those of `GaussianFeedForwardSpec`; 0: all neurons are active."""

    streams: int
    deviations: tuple[float, ...]

    def layer(
        self,
        mixer: ResidualBlock[Any],
        feed_forward: ResidualBlock[Any],
        output: LayerOutputSpec,
        norm: NormSpec,
        width: int,
    ) -> LayerSpec:
        """A layer with these blocks and this input from the per-layer embeddings."""
        predict = AltUpPredictSpec(norm, self.streams, width, is_first=output.layer == 0)
        laurel = ResidualBlock(LaurelSpec(norm, LAUREL_RANK), norm, shares_input=True)
        correct = AltUpCorrectSpec(norm, self.streams, output)
        return LayerSpec(
            (ResidualBlock(predict, norm), mixer, laurel, feed_forward, ResidualBlock(correct, norm))
        )

    def feed_forward(
        self, layer: int, activation: Activation, neurons: int
    ) -> FeedForwardSpec | GaussianFeedForwardSpec:
        """The feed-forward of a layer."""
        deviations = self.deviations[layer]
        if not deviations:
            return FeedForwardSpec(activation, neurons)
        return GaussianFeedForwardSpec(activation, neurons, deviations)


def altup_config(reader: MetadataReader, layers: int) -> AltUpConfig:
    """The config of a model with this number of layers."""
    active = reader.count("altup.active_idx", 0, minimum=0)
    if active:
        raise reader.refused("altup.active_idx", active, "0, the first stream")
    streams = reader.count("altup.num_inputs", DEFAULT_STREAMS, minimum=2, maximum=MAX_STREAMS)
    return AltUpConfig(streams, _deviations(reader, layers))


def _deviations(reader: MetadataReader, layers: int) -> tuple[float, ...]:
    """The standard deviations of each layer; 0 instead of -∞, with which all neurons are active."""
    given = reader.get("activation_sparsity_scale")
    if given is None:
        sparse = [index < DEFAULT_SPARSE_LAYERS for index in range(layers)]
        return tuple(DEFAULT_DEVIATIONS if each else 0.0 for each in sparse)
    values = np.asarray(given)
    if values.dtype.kind != "f" or values.shape != (layers,) or not (values < np.inf).all():
        raise reader.refused("activation_sparsity_scale", given, f"a number for each of {layers} layers")
    return tuple(float(value) if value > -np.inf else 0.0 for value in values)
