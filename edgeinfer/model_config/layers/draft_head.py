"""Draft heads (MTP, the `nextn` tensors): one layer that drafts from a hidden state and the token after it.

The head is the layer after the model's last one, of the kind of its attention layers. It is part of
the model's file, or has a separate one with the metadata of the model: that of llama.cpp's converters has
copies of the model's embedding, norm and output, which aren't read; that of `training/` has an output for
some of the ids, which `d2t` has, as in files of EAGLE-3 heads.
Sources: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2 (arXiv:2412.19437); llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.config_reader import config_from_metadata
from edgeinfer.model_config.layers.draft_output import read_output
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer.model_config.weights import FileTensors, LayerTensors, is_head_file, routed_layers
from edgeinfer_kernels.blocks.embedding.draft_input import DraftInputSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualBlock,
)
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import printable

OUTPUT = "shared_head_head"


@dataclass(frozen=True)
class DraftHeadModel:
    """A draft head as a decoder of one layer. It reads the embedding of its target, and multiplies with the
    first rows of the target's output; `own_embedding`, `own_output`: it has separate matrices.
    `target_layers`: after how many layers of the target it reads hidden states, side by side; empty: after
    all of them and the output norm. `target_caches`: its attention blocks that read the KV cache of a block
    of the target.
    """

    spec: DecoderSpec
    weights: DecoderWeights
    own_output: bool
    own_embedding: bool = False
    target_layers: tuple[int, ...] = ()
    target_caches: Mapping[BlockIndex, BlockIndex] = field(default_factory=dict)

    @property
    def sizes(self) -> ModelSizes:
        """Its sizes; they count no bytes for a matrix of the target."""
        sizes = ModelSizes.of(self.spec, self.weights)
        shares_table = sizes.embedding is not None and not self.own_embedding
        return replace(
            sizes,
            shares_head=not self.own_output,
            shares_embedding=shares_table,
            target_layers=self.target_layers,
        )

    @property
    def output_share(self) -> float:
        """The part of the bytes of the weights that a token reads that are those of the output."""
        used = max((moe.experts_per_token for moe in self.spec.specs(MoeSpec)), default=1)
        read = sum(each.nbytes * min(1.0, used / each.experts) for each in self.weights.matrices())
        return self.weights.output.nbytes / read

    def allocate_state(self, context: int, kind: CacheType) -> DecoderState:
        """Its zeroed KV caches for `context` tokens."""
        return DecoderState.allocate(self.spec, context, kind)

    def with_embedding_of(self, spec: DecoderSpec, table: Matrix) -> "DraftHeadModel":
        """As it is on a GPU, for a target with this specification and embedding: an assistant's is that one,
        and its own only the output.
        """
        if not self.target_caches:
            return self
        own = replace(self.spec, embedding_scale=spec.embedding_scale)
        return replace(self, spec=own, weights=replace(self.weights, token_embd=table), own_embedding=False)


def read_draft_head(
    file: GGUFFile,
    target: ModelConfig,
    tables: DecoderWeights,
    factors: Factors | None = None,
    *,
    head: int = 0,
    shapes_only: bool = False,
) -> DraftHeadModel:
    """A draft head of a file, for a target with this config and these weights, which it shares.

    Raises:
        UnsupportedModelError: it has none, or one that isn't supported or belongs to another model.
    """
    config = _own_config(file, target) if is_head_file(file) else target
    _check_supported(config)
    layer = len(config.shapes) + head
    tensors = FileTensors(file, f"the draft head of {config.architecture}", shapes_only=shapes_only)
    reader, prefix = LayerTensors(tensors, layer, config.width), f"blk.{layer}.nextn"
    rows = target.vocabulary_size
    embedding = tensors.matrix(f"{prefix}.embed_tokens.weight", (rows, config.width))
    output = read_output(tensors, f"{prefix}.{OUTPUT}", rows, config.width, tables.output)
    spec = head_specification(config, output.matrix.rows, factors, _own_layer(file, config, layer, factors))
    blocks = tuple(residual.read(reader) for residual in spec.layers[0].blocks)
    norm = _last_norm(reader, config)
    _check_used(tensors, layer)
    weights = DecoderWeights(
        token_embd=embedding or tables.token_embd,
        output=output.matrix,
        output_norm=tables.output_norm if norm is None else norm,
        output_norm_bias=tables.output_norm_bias if norm is None else None,
        layers=(LayerWeights(blocks),),
        output_ids=output.ids,
    )
    raw = (len(target.shapes),) if config.architecture_spec.raw_draft_states else ()
    return DraftHeadModel(spec, weights, output.is_own, embedding is not None, target_layers=raw)


def _own_config(file: GGUFFile, target: ModelConfig) -> ModelConfig:
    """The config in a file that has only heads, which belong to a target with this config."""
    name, count = file.metadata.get("general.architecture"), len(target.shapes)
    if name != target.architecture:
        raise _belongs_elsewhere("architecture", printable(str(name)), target.architecture)
    routed = None if target.routed_layers is None else {*target.routed_layers, *routed_layers(file)}
    own = config_from_metadata(file.metadata, target.vocabulary_size, routed)
    if own.width != target.width:
        raise _belongs_elsewhere("width", own.width, target.width)
    if len(own.shapes) != count:
        raise UnsupportedModelError(
            f"draft head: it follows layer {len(own.shapes)}, but the model has {count}"
        )
    return replace(own, architecture_spec=target.architecture_spec)


def _belongs_elsewhere(what: str, seen: object, wanted: object) -> UnsupportedModelError:
    return UnsupportedModelError(f"draft head: {what} {seen}, wanted {wanted}, that of the model")


def head_count(file: GGUFFile, target: ModelConfig) -> int:
    """The number of draft heads in a file that `read_draft_head` reads."""
    return (_own_config(file, target) if is_head_file(file) else target).draft_heads


def _own_layer(file: GGUFFile, config: ModelConfig, layer: int, factors: Factors | None) -> LayerSpec | None:
    """A head's layer by its entries in the arrays of the file; None: it is as the model's attention layers.

    That of a model whose layers are single blocks has attention and a feed-forward.
    """
    spec = config.architecture_spec
    if not spec.raw_draft_states and not spec.single_blocks:
        return None
    if spec.single_blocks:
        spec = replace(spec, single_blocks=False, feed_forward_norm="post_attention_norm")
    metadata = {**file.metadata, f"{config.architecture}.nextn_predict_layers": 0}
    whole = config_from_metadata(metadata, config.vocabulary_size, config.routed_layers)
    return replace(whole, architecture_spec=spec).layer(layer, factors)


def _last_norm(reader: LayerTensors, config: ModelConfig) -> Vector | None:
    """The weights of the norm before a head's output; None: those of the model."""
    names = [f"{name}.weight" for name in config.architecture_spec.draft_norms]
    found = [norm for name in names if (norm := reader.vector(name, config.width)) is not None]
    if config.draft_norm is not None and not found:
        return reader.required(names[0], config.width)
    return found[0] if found else None


def head_specification(
    config: ModelConfig, vocabulary: int, factors: Factors | None = None, layer: LayerSpec | None = None
) -> DecoderSpec:
    """The head as a decoder: this layer, or one more of the model's attention layers."""
    first = ResidualBlock(DraftInputSpec(config.norm, config.architecture_spec.raw_draft_states), config.norm)
    layer = _next_layer(config, factors) if layer is None else layer
    whole = replace(config, shapes=config.shapes[:1]).specification(factors)
    layers, norm = (LayerSpec((first, *layer.blocks)),), config.draft_norm or config.norm
    spec = replace(whole, vocabulary_size=vocabulary, layers=layers, norm=norm)
    return spec.with_whole_caches()


def _next_layer(config: ModelConfig, factors: Factors | None) -> LayerSpec:
    """One more of the model's attention layers."""
    shape = next(shape for shape in reversed(config.shapes) if shape.heads)
    longer: dict[str, Any] = {
        name: (*getattr(config, name), value)
        for name, value in (("shapes", shape), ("windowed", False))
    }  # fmt: skip
    if config.recurrent_layers:
        longer["recurrent_layers"] = (*config.recurrent_layers, False)
    for name in ("limits", "expert_limits"):
        if values := getattr(config, name):
            longer[name] = (*values, values[-1])
    return replace(config, **longer).layer(len(config.shapes), factors)


def _check_supported(config: ModelConfig) -> None:
    if config.draft_heads != 1 and not (config.draft_heads and config.architecture_spec.raw_draft_states):
        raise UnsupportedModelError(f"draft head: the file has {config.draft_heads} of them, wanted 1")
    if not config.architecture_spec.draft_head:
        raise UnsupportedModelError(f"draft head: edgeinfer doesn't know that of {config.architecture}")


def _check_used(tensors: FileTensors, layer: int) -> None:
    """Raise if the head has a tensor that wasn't read: ignoring it would only give useless drafts."""
    prefix = f"blk.{layer}."
    if left := [
        each for each in tensors.file.tensors if each.startswith(prefix) and each not in tensors.taken
    ]:
        raise UnsupportedModelError(f"draft head: {left[0]} isn't known for {tensors.needed_by}")
