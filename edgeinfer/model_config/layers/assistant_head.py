"""Gemma 4 assistants: files of llama.cpp's architecture `gemma4-assistant`.

A few narrow layers of Gemma 4 without keys and values, which read the KV caches of the target's last layer
with a window and of its last one without. So a token of a draft isn't cached: each is processed at the same
position, that of the first one, and differs only in the state that it reads.
Source: llama.cpp.
"""

from dataclasses import replace

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer.model_config.weights import ASSISTANT, FileTensors, read_decoder, rope_factors
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec, DecoderWeights, LayerSpec, ResidualBlock
from edgeinfer_quant_formats import GGUFFile

NEEDED_BY = "a Gemma 4 assistant"
UNUSED = ("masked_embd_centroids.weight", "masked_embd_ordering")
"""Tensors of another kind of output, which llama.cpp doesn't use either."""


def is_assistant_file(file: GGUFFile) -> bool:
    """Whether a file has a Gemma 4 assistant."""
    return file.has_text("general.architecture", ASSISTANT)


def read_assistant_head(
    file: GGUFFile,
    target: ModelConfig,
    tables: DecoderWeights,
    context: int = 0,
    *,
    shapes_only: bool = False,
) -> DraftHeadModel:
    """The assistant of a file, for a target with this config. It has its own embedding, `tables` isn't read.

    Raises:
        UnsupportedModelError: it isn't supported, or belongs to another model.
    """
    config = _config(file, target)
    tensors = FileTensors(file, NEEDED_BY, shapes_only=shapes_only)
    factors = None if shapes_only else rope_factors(file, config, context)
    whole = replace(config.specification(factors), embedding_scale=1.0, logit_soft_cap=0.0)
    spec, caches = _with_target_caches(whole, target)
    weights = read_decoder(tensors, spec)
    for name in UNUSED:
        tensors.info(name)
    tensors.check_all_used()
    return DraftHeadModel(spec, weights, own_output=True, own_embedding=True, target_caches=caches)


def _config(file: GGUFFile, target: ModelConfig) -> ModelConfig:
    """The config of the layers."""
    if target.architecture != "gemma4":
        raise UnsupportedModelError(f"draft head: {NEEDED_BY}, but the model is {target.architecture}")
    own = {"nextn_predict_layers": 0, "attention.shared_kv_layers": 0}
    metadata = {**file.metadata, **{f"{ASSISTANT}.{key}": value for key, value in own.items()}}
    reader = MetadataReader(metadata)
    config = config_from_metadata(
        metadata, target.vocabulary_size, frozenset(), architecture=ARCHITECTURES["gemma4"]
    )
    for key, seen, wanted in (
        ("embedding_length_out", reader.count("embedding_length_out"), target.width),
        ("embedding_length_per_layer_input", config.per_layer_width, 0),
        ("attention.sliding_window", config.window, target.window),
    ):
        if seen != wanted:
            raise reader.refused(key, seen, f"{wanted}, as for the model")
    return config


def _with_target_caches(
    spec: DecoderSpec, target: ModelConfig
) -> tuple[DecoderSpec, dict[BlockIndex, BlockIndex]]:
    """The layers with the input block, and with attention on the target's caches."""
    decoder, layers, caches = target.specification(), list[LayerSpec](), dict[BlockIndex, BlockIndex]()
    for index, layer in enumerate(spec.layers):
        attention = layer.blocks[0]
        source = _source(decoder, attention.block.window > 0)
        block = _on_cache(attention.block, source, decoder.residual(source).block)
        blocks = (replace(attention, block=block), *layer.blocks[1:])
        if not index:
            blocks = (ResidualBlock(AssistantInputSpec(target.width), spec.norm), *blocks)
        layers.append(LayerSpec(blocks))
        caches[BlockIndex(index, int(not index))] = source
    return replace(spec, layers=tuple(layers)), caches


def _source(target: DecoderSpec, windowed: bool) -> BlockIndex:
    """The block of the target whose cache is that of its last layer, or with a window of the layer before."""
    layer = len(target.layers) - (2 if windowed else 1)
    found = [
        at
        for at, each in enumerate(target.layers[layer].blocks if layer >= 0 else ())
        if isinstance(each.block, AttentionSpec) and (each.block.window > 0) == windowed
    ]
    if not found:
        seen, wanted = ("no", "one") if windowed else ("a", "none")
        raise UnsupportedModelError(
            f"draft head: layer {layer} of the model has {seen} window, wanted {wanted}, for {NEEDED_BY}"
        )
    return target.state_source(BlockIndex(layer, found[0]))


def _on_cache(own: AttentionSpec, source: BlockIndex, of: AttentionSpec) -> AttentionSpec:
    """Attention with the queries of an assistant on a cache of its target.

    The token is one position after the last cached one. So it is processed at that of the latter, with its
    own rotation, and a window without itself.
    """
    seen, wanted = (own.kv_heads, own.head_dim), (of.kv_heads, of.head_dim)
    if seen != wanted:
        raise UnsupportedModelError(
            f"draft head: {seen[0]} key heads of {seen[1]}, wanted {wanted[0]} of {wanted[1]}, as in layer "
            f"{source.layer} of the model"
        )
    if own.window == 1 or own.rope is None:
        raise UnsupportedModelError(f"draft head: a window of {own.window}, wanted 2 or more, and RoPE")
    return replace(
        own,
        source_layer=source.layer,
        ring=of.ring,
        window=max(0, own.window - 1),
        rope=replace(own.rope, shift=1),
    )
