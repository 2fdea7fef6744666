"""Block drafters (DFlash, DFlash 2, DSpark): files of llama.cpp's architecture `dflash`.

A few layers evaluate a block of tokens at once: the last token of the text, and masks. Each attends to the
whole block and to the text, of which the layers' caches have the keys and values of the target's hidden
states after some of its layers, fused by one matrix. Each row of the block gives the logits of one token.
With a Markov head (DSpark) the token before it adds to them. With a selector (DFlash 2) it adds to those of
the best candidates, and the layers have convolutions over the block.
Source: llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.architecture import Architecture
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.layers.draft_head import DraftHeadModel
from edgeinfer.model_config.layers.draft_output import first_rows, read_output
from edgeinfer.model_config.layers.eagle_head import target_layers
from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer.model_config.weights import DFLASH, FileTensors, LayerTensors, rope_factors
from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.embedding.convolved_input import LANES, Convolution, ConvolvedInputSpec
from edgeinfer_kernels.blocks.embedding.convolved_result import ConvolvedResultSpec, ConvolvedResultWeights
from edgeinfer_kernels.blocks.embedding.draft_keys import DraftKeysSpec, DraftKeysWeights
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
    ResidualWeights,
)
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import Matrix, MatrixSize
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile

NEEDED_BY = "a block drafter"
DEFAULT_BLOCK, MAX_BLOCK = 16, 1024
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}
MASK_KEY = "tokenizer.ggml.mask_token_id"
SELECTOR = "selector_hidden.weight"
"""The tensor by which files of DFlash 2 are known."""
UNUSED = ("conf_proj.weight", "conf_proj.bias")
"""Tensors of a head that estimates which tokens are accepted; llama.cpp reads it only for a minimum."""


@dataclass(frozen=True)
class Selector:
    """What selects among the `count` best candidates of a row: ⟨successor of a candidate, predecessor of the
    token before · W_hidden · state⟩ is added to their logits. The first two have a row for each token.
    """

    hidden: Matrix
    predecessor: Matrix
    successor: Matrix
    count: int


@dataclass(frozen=True)
class BlockDraftModel(DraftHeadModel):
    """A block drafter as a decoder. Its layer 0 writes the keys and values of the target's states to the
    caches of the others, which evaluate a block of up to `block_size` tokens.

    `from_first`: row i of a block gives the logits of draft token i; else row i + 1. `markov`: the Markov
    head, a decoder without layers: its logits for a token are added to those of the token after it.
    """

    mask_token: int = 0
    block_size: int = DEFAULT_BLOCK
    from_first: bool = False
    markov: DraftHeadModel | None = None
    selector: Selector | None = None

    @property
    def sizes(self) -> ModelSizes:
        """As `DraftHeadModel.sizes`, with the matrix of a selector."""
        decoded = None if self.selector is None else MatrixSize.of(self.selector.hidden)
        return replace(super().sizes, decoded=decoded)

    @property
    def max_drafted(self) -> int:
        """The number of tokens that a block drafts at most."""
        return self.block_size if self.from_first else self.block_size - 1

    def rows_of(self, drafted: int) -> int:
        """The rows of a block that drafts this many tokens."""
        return drafted if self.from_first else 1 + drafted

    def allocate_state(self, context: int, kind: CacheType) -> DecoderState:
        """As `DraftHeadModel.allocate_state`; layer 0 has the caches of the others."""
        layers = enumerate(self.spec.layers[1:], 1)
        sources = {BlockIndex(0, at): BlockIndex(at, _attention_at(layer)) for at, layer in layers}
        return replace(super().allocate_state(context, kind), sources=sources)


def _attention_at(layer: LayerSpec) -> int:
    """The position of the attention block in a layer of a block."""
    return next(at for at, each in enumerate(layer.blocks) if isinstance(each.block, AttentionSpec))


def is_block_file(file: GGUFFile) -> bool:
    """Whether a file has a block drafter."""
    return file.has_text("general.architecture", DFLASH)


def read_block_drafts(
    file: GGUFFile,
    target: ModelConfig,
    tables: DecoderWeights,
    context: int = 0,
    *,
    shapes_only: bool = False,
) -> BlockDraftModel:
    """The block drafter of a file, for a target with this config and these weights, which it may share.

    Raises:
        UnsupportedModelError: it isn't supported, or belongs to another model.
    """
    reader, tensors = MetadataReader(file.metadata), FileTensors(file, NEEDED_BY, shapes_only=shapes_only)
    _check_supported(reader, file)
    config = config_from_metadata(
        file.metadata, target.vocabulary_size, architecture=_architecture(reader, file)
    )
    if config.width != target.width:
        raise reader.refused("embedding_length", config.width, f"{target.width}, that of the model")
    layers = target_layers(reader, target)
    factors = None if shapes_only else rope_factors(file, config, context)
    embedding = tensors.matrix("token_embd.weight", (target.vocabulary_size, config.width))
    shared = embedding or tables.output
    output = read_output(tensors, "output", target.vocabulary_size, config.width, shared)
    rows = output.matrix.rows
    selector = _selector(reader, tensors, config.width, target.vocabulary_size)
    spec = _specification(config, reader, len(layers) * target.width, rows, factors)
    if selector is None:
        spec = replace(spec, logit_scale=1.0, logit_soft_cap=0.0)
    norm = LayerTensors(tensors, 0, config.width).model_vector("output_norm.weight", config.width)
    weights = DecoderWeights(
        token_embd=embedding or tables.token_embd,
        output=output.matrix,
        output_norm=norm,
        output_norm_bias=None,
        layers=_layers(spec, tensors, config.width),
        output_ids=output.ids,
    )
    markov = _markov(tensors, config, target.vocabulary_size, rows)
    for name in UNUSED:
        tensors.info(name)
    tensors.check_all_used()
    return BlockDraftModel(
        spec,
        weights,
        output.is_own or embedding is not None,
        embedding is not None,
        layers,
        mask_token=_mask_token(file.metadata, target),
        block_size=reader.count("block_size", DEFAULT_BLOCK, minimum=2, maximum=MAX_BLOCK),
        from_first=markov is not None and bool(reader.get("sample_from_anchor", True)),
        markov=markov,
        selector=selector,
    )


def _check_supported(reader: MetadataReader, file: GGUFFile) -> None:
    """Raise for the kinds of block drafters that edgeinfer doesn't run."""
    if reader.count("hyper_connection_count", 0, minimum=0):
        raise UnsupportedModelError("draft head: edgeinfer doesn't run drafters with hyper-connections")
    if SELECTOR in file.tensors and "blk.0.post_attention_norm.weight" in file.tensors:
        raise UnsupportedModelError("draft head: a selector and norms after attention, wanted one of both")


def _architecture(reader: MetadataReader, file: GGUFFile) -> Architecture:
    """The properties of the layers, some of which the file's tensors give."""
    name = reader.get("hidden_activation", "silu")
    if name not in ACTIVATIONS:
        raise reader.refused("hidden_activation", name, f"one of {', '.join(ACTIVATIONS)}")
    has = file.tensors.__contains__
    spec = Architecture(
        rope_neox=True,
        qk_norm="head",
        sinks=True,
        optional_sinks=True,
        window_pattern=1,
        value_lengths=True,
        value_norm=not has("blk.0.attn_v.weight"),
        post_norm=has("blk.0.post_attention_norm.weight"),
        logits_multiplied=True,
        layer_outputs=has("blk.0.layer_output_scale.weight"),
        activation="gelu" if ACTIVATIONS[name] == "gelu" else "silu",
    )
    if spec.post_norm and reader.factor("attention.value_scale"):
        value = reader.get("attention.value_scale")
        raise reader.refused("attention.value_scale", value, "none in layers with norms after attention")
    return spec


def _specification(
    config: ModelConfig, reader: MetadataReader, features: int, rows: int, factors: Factors | None
) -> DecoderSpec:
    """The layers of a block, after the one that writes to their caches."""
    whole_step, layers, keys = not reader.flag("attention.causal"), list[LayerSpec](), list[DraftKeysSpec]()
    convolution = _convolution(reader, config.width)
    for index in range(len(config.shapes)):
        attention, feed_forward, *others = config.layer(index, factors).blocks
        attention = replace(attention, block=replace(attention.block, whole_step=whole_step))
        blocks: list[ResidualBlock[Any]] = [attention, feed_forward]
        if convolution is not None:
            named = ((attention, "attn"), (feed_forward, "ffn"))
            blocks = [each for block, name in named for each in _convolved(block, convolution, name)]
        layers.append(LayerSpec((*blocks, *others)))
        keys.append(DraftKeysSpec(attention.block, 1 + index))
    first = (FusedStatesSpec(config.norm, features), *keys)
    spec = replace(
        config.specification(factors),
        vocabulary_size=rows,
        layers=(LayerSpec(tuple(ResidualBlock(block, config.norm) for block in first)), *layers),
    )
    return spec.with_whole_caches()


def _convolution(reader: MetadataReader, width: int) -> Convolution | None:
    """That of the layers; None: they have none."""
    taps = reader.count("conv_kernel_size", 0, minimum=0, maximum=64)
    if not taps:
        return None
    group = reader.count("conv_group_size")
    if group % LANES or width % group:
        raise reader.refused("conv_group_size", group, f"a multiple of {LANES} that divides {width}")
    return Convolution(taps, group)


def _convolved(
    residual: ResidualBlock[Any], convolution: Convolution, name: str
) -> tuple[ResidualBlock[Any], ...]:
    """A block between two convolutions; the first has its norm."""
    norm = residual.norm
    before = ResidualBlock(ConvolvedInputSpec(convolution, name), norm, residual.norm_name)
    after = ResidualBlock(ConvolvedResultSpec(convolution), norm)
    return before, replace(residual, norm_name=""), after


def _selector(reader: MetadataReader, tensors: FileTensors, width: int, vocabulary: int) -> Selector | None:
    """What selects among candidates; None: nothing does."""
    if SELECTOR not in tensors.file.tensors:
        return None
    rank, count = reader.count("selector_rank"), reader.count("selector_top_k", maximum=vocabulary)
    if not reader.count("conv_kernel_size", 0, minimum=0):
        raise reader.refused("conv_kernel_size", 0, "a convolution, as a selector needs")
    return Selector(
        _required(tensors, SELECTOR, (rank, width)),
        _required(tensors, "selector_predecessor.weight", (vocabulary, rank)),
        _required(tensors, "selector_successor.weight", (vocabulary, rank)),
        count,
    )


def _layers(spec: DecoderSpec, tensors: FileTensors, width: int) -> tuple[LayerWeights, ...]:
    """The weights of all layers; those of layer 0 are among the others, but for the first block."""
    layers = list[LayerWeights]()
    for index, layer in enumerate(spec.layers[1:]):
        reader, blocks = LayerTensors(tensors, index, width), list[ResidualWeights[Any]]()
        for at, residual in enumerate(layer.blocks):
            if isinstance(residual.block, ConvolvedResultSpec):
                blocks.append(ResidualWeights(ConvolvedResultWeights(blocks[at - 2].block.base)))
            else:
                blocks.append(residual.read(reader))
        layers.append(LayerWeights(tuple(blocks)))
    fused = spec.layers[0].blocks[0].read(LayerTensors(tensors, 0, width))
    keys = (ResidualWeights(DraftKeysWeights(layer.block_of(AttentionWeights))) for layer in layers)
    return LayerWeights((fused, *keys)), *layers


def _markov(tensors: FileTensors, config: ModelConfig, vocabulary: int, rows: int) -> DraftHeadModel | None:
    """The Markov head, of which a token's row of one matrix is the hidden state; None: there is none."""
    info = tensors.info("markov_w1.weight")
    if info is None:
        return None
    rank = info.shape[-1]
    table = _required(tensors, "markov_w1.weight", (vocabulary, rank))
    stored = tensors.info("markov_w2.weight")
    of_file = rows if stored is None else stored.shape[0]
    output = _required(tensors, "markov_w2.weight", (max(rows, of_file), rank))
    spec = DecoderSpec(rank, rows, (), config.norm, norm_name="")
    weights = DecoderWeights(table, first_rows(output, rows), None, None, ())
    return DraftHeadModel(spec, weights, own_output=True, own_embedding=True)


def _required(tensors: FileTensors, name: str, shape: tuple[int, int]) -> Matrix:
    found = tensors.matrix(name, shape)
    if found is None:
        raise tensors.missing(name)
    return found


def _mask_token(metadata: Mapping[str, object], target: ModelConfig) -> int:
    """The id of the token that stands for unknown ones."""
    found = metadata.get(MASK_KEY)
    if type(found) is not int or not 0 <= found < target.vocabulary_size:
        raise UnsupportedModelError(
            f"{MASK_KEY}: saw {found!r}, wanted 0 to {target.vocabulary_size - 1}, an id of the model"
        )
    return found
