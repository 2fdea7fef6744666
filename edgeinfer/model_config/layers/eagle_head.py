"""EAGLE-3 heads: files of llama.cpp's architecture `eagle3`.

One layer reads three hidden states of its target, fused by one matrix, and the embedding of the token after
them. Its output matrix may have fewer rows than the vocabulary; `d2t` then has their token ids.
Sources: Li et al. 2025, "EAGLE-3" (arXiv:2503.01840); llama.cpp.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.model_config.layers.draft_output import read_output
from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer.model_config.weights import EAGLE, FileTensors, LayerTensors, rope_factors
from edgeinfer_kernels.blocks.embedding.eagle_input import EagleInputSpec
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, LayerSpec, LayerWeights, ResidualBlock
from edgeinfer_quant_formats import GGUFFile

NEEDED_BY = "an EAGLE-3 head"


def is_eagle_file(file: GGUFFile) -> bool:
    """Whether a file has an EAGLE-3 head."""
    return file.has_text("general.architecture", EAGLE)


def read_eagle_head(
    file: GGUFFile,
    target: ModelConfig,
    tables: DecoderWeights,
    context: int = 0,
    *,
    shapes_only: bool = False,
) -> DraftHeadModel:
    """The head of a file, for a target with this config and these weights, which it may share.

    Raises:
        UnsupportedModelError: it isn't supported, or belongs to another model.
    """
    config = config_from_metadata(file.metadata, target.vocabulary_size, architecture=Architecture())
    reader, tensors = MetadataReader(file.metadata), FileTensors(file, NEEDED_BY, shapes_only=shapes_only)
    layers = _target_layers(reader, target)
    factors = None if shapes_only else rope_factors(file, config, context)
    embedding = tensors.matrix("token_embd.weight", (target.vocabulary_size, config.width))
    output = read_output(tensors, "output", target.vocabulary_size, config.width, tables.output)
    _check_shared(config, target, has_embedding=embedding is not None, has_output=output.is_own)
    spec = _specification(config, reader, len(layers) * target.width, output.matrix.rows, factors)
    blocks = (residual.read(LayerTensors(tensors, 0, config.width)) for residual in spec.layers[0].blocks)
    weights = DecoderWeights(
        token_embd=embedding or tables.token_embd,
        output=output.matrix,
        output_norm=_required(tensors, "output_norm.weight", config.width),
        output_norm_bias=None,
        layers=(LayerWeights(tuple(blocks)),),
        output_ids=output.ids,
    )
    tensors.check_all_used()
    return DraftHeadModel(spec, weights, output.is_own, embedding is not None, layers)


def _specification(
    config: ModelConfig, reader: MetadataReader, features: int, rows: int, factors: Factors | None
) -> DecoderSpec:
    """The head as a decoder: an input block, attention that reads pairs, and a feed-forward."""
    first = EagleInputSpec(
        config.norm, features, reader.flag("norm_before_fc"), reader.flag("norm_before_residual")
    )
    attention, feed_forward = config.layer(0, factors).blocks
    attention = replace(
        attention, block=replace(attention.block, pair_input=True), norm_name="", shares_input=True
    )
    blocks = (ResidualBlock(first, config.norm), attention, feed_forward)
    spec = replace(config.specification(factors), vocabulary_size=rows, layers=(LayerSpec(blocks),))
    return spec.with_whole_caches()


def _target_layers(reader: MetadataReader, target: ModelConfig) -> tuple[int, ...]:
    """After how many layers of the target the head reads hidden states."""
    if (found := reader.count("block_count")) != 1:
        raise reader.refused("block_count", found, "1, the layer of an EAGLE-3 head")
    width = reader.count("target_hidden_size", target.width)
    if width != target.width:
        raise reader.refused("target_hidden_size", width, f"{target.width}, that of the model")
    return target_layers(reader, target, three=True)


def target_layers(reader: MetadataReader, target: ModelConfig, *, three: bool = False) -> tuple[int, ...]:
    """After how many layers of the target a draft head reads hidden states, as its file says."""
    count, given = len(target.shapes), reader.get("target_layers")
    values = given.tolist() if isinstance(given, np.ndarray) else given
    are_counts = isinstance(values, list) and all(type(v) is int and 0 <= v <= count for v in values)
    if not are_counts or not values or (three and len(values) != 3):
        expected = "three numbers" if three else "numbers"
        raise reader.refused("target_layers", values, f"{expected} of layers, each up to {count}")
    return tuple(values)


def _check_shared(config: ModelConfig, target: ModelConfig, *, has_embedding: bool, has_output: bool) -> None:
    """Raise if the head lacks a matrix that the target's can't replace."""
    if config.width != target.width and not (has_embedding and has_output):
        missing = "output" if has_embedding else "token_embd"
        raise UnsupportedModelError(
            f"draft head: width {config.width} and no {missing}.weight, wanted {target.width}, the width of "
            "the model whose matrix it would share"
        )


def _required(tensors: FileTensors, name: str, length: int) -> npt.NDArray[np.float32]:
    found = tensors.vector(name, length)
    if found is None:
        raise tensors.missing(name)
    return found
