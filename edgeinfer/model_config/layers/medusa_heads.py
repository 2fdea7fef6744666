"""Medusa heads: files that `edgeinfer convert` writes from the published layout.

Head i predicts the token i + 2 positions after a hidden state of the target, whose own output predicts the
first one after it. Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774).
"""

from dataclasses import dataclass, replace

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer.model_config.weights import MEDUSA, FileTensors, LayerTensors
from edgeinfer_kernels.blocks.embedding.medusa_head import MedusaHeadSpec
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, LayerSpec, LayerWeights, ResidualBlock
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_quant_formats import GGUFFile

MAX_HEADS = 16
NEEDED_BY = "a Medusa head"


@dataclass(frozen=True)
class MedusaModel:
    """The heads as a decoder: each is a layer of one block, whose output is its own."""

    spec: DecoderSpec
    weights: DecoderWeights

    @property
    def sizes(self) -> ModelSizes:
        """Its sizes; the embedding is the target's, and there is no output besides those of the heads."""
        sizes = ModelSizes.of(self.spec, self.weights)
        return replace(sizes, shares_head=True, shares_embedding=True)


def is_medusa_file(file: GGUFFile) -> bool:
    """Whether a file has Medusa heads."""
    return file.has_text("general.architecture", MEDUSA)


def read_medusa(
    file: GGUFFile, target: ModelConfig, tables: DecoderWeights, *, shapes_only: bool = False
) -> MedusaModel:
    """The heads of a file, for a target with this config and these weights.

    Raises:
        UnsupportedModelError: they aren't supported, or belong to another model.
    """
    reader, tensors = MetadataReader(file.metadata), FileTensors(file, NEEDED_BY, shapes_only=shapes_only)
    count, width = reader.count("head_count", maximum=MAX_HEADS), reader.count("embedding_length")
    if width != target.width:
        raise reader.refused("embedding_length", width, f"{target.width}, that of the model")
    rows = reader.count("vocabulary_size")
    if rows > target.vocabulary_size:
        raise reader.refused("vocabulary_size", rows, f"{target.vocabulary_size}, that of the model")
    norm = target.norm
    spec = DecoderSpec(
        hidden_size=width,
        vocabulary_size=rows,
        layers=(LayerSpec((ResidualBlock(MedusaHeadSpec(rows), norm),)),) * count,
        norm=norm,
        norm_name="",
    )
    layers = []
    for index, layer in enumerate(spec.layers):
        of_head = LayerTensors(tensors, index, width)
        layers.append(LayerWeights(tuple(block.read(of_head) for block in layer.blocks)))
    _check_used(tensors)
    none = tables.output.take_rows(0, 0)
    return MedusaModel(spec, DecoderWeights(tables.token_embd, none, None, None, tuple(layers)))


def _check_used(tensors: FileTensors) -> None:
    left = [name for name in tensors.file.tensors if name not in tensors.taken]
    if left:
        raise UnsupportedModelError(f"draft head: {left[0]} isn't known for {NEEDED_BY}")
