"""Reads the sizes of latent attention (MLA) from metadata."""

import math
from dataclasses import dataclass, replace

from edgeinfer.model_config.metadata_reader import MetadataReader
from edgeinfer.model_config.rope_scaling import RopeScaling
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.temperature import Temperature
from edgeinfer_kernels.blocks.latent_attention import LatentAttentionSpec

MAX_LATENT, MAX_QUERY_RANK = 1 << 10, 1 << 20


@dataclass(frozen=True)
class LatentConfig:
    """The lengths of a head's query without RoPE, of its value and of the latent vector; the rank of the
    queries' projection, 0: it is one matrix.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int

    @property
    def key_length(self) -> int:
        """Elements of a head's query."""
        return self.nope_dim + self.rope_dim

    def specification(
        self, heads: int, scale: float, norm: NormSpec, rope: RopeSpec | None, temperature: Temperature
    ) -> LatentAttentionSpec:
        """The block of a layer."""
        lengths = self.nope_dim, self.rope_dim, self.value_dim, self.latent_dim
        return LatentAttentionSpec(heads, *lengths, scale, norm, rope, self.query_rank, temperature)


def latent_attention(metadata: MetadataReader) -> LatentConfig:
    """The latent attention of DeepSeek-V2. Older files have only the lengths of heads, without "_mla"."""
    lengths_of_heads = metadata.get("attention.key_length"), metadata.get("attention.value_length")
    key_length = metadata.count("attention.key_length_mla", lengths_of_heads[0], maximum=MAX_LATENT)
    rope_dim = metadata.count("rope.dimension_count", minimum=2, maximum=key_length - 1)
    value_dim = metadata.count("attention.value_length_mla", lengths_of_heads[1], maximum=MAX_LATENT)
    latent_dim = metadata.count("attention.kv_lora_rank", maximum=MAX_LATENT)
    lengths = {
        "rope.dimension_count": (rope_dim, 16, ""),
        "attention.key_length_mla": (key_length - rope_dim, 32, " without the RoPE dimensions"),
        "attention.value_length_mla": (value_dim, 16, ""),
        "attention.kv_lora_rank": (latent_dim, 32, ""),
    }
    for key, (length, multiple, what) in lengths.items():
        if length % multiple:
            raise metadata.refused(key, length, f"a multiple of {multiple}{what}")
    rank = metadata.count("attention.q_lora_rank", 0, minimum=0, maximum=MAX_QUERY_RANK)
    return LatentConfig(key_length - rope_dim, rope_dim, value_dim, latent_dim, rank)


def latent_scaling(metadata: MetadataReader, scaling: RopeScaling) -> RopeScaling:
    """The RoPE scaling; with a log multiplier it doesn't change the magnitude of cosine and sine."""
    if scaling.kind != "yarn" and scaling.factor != 1:
        raise metadata.refused("rope.scaling.type", scaling.kind, "yarn")
    return replace(scaling, log_multiplier=1.0) if scaling.log_multiplier else scaling


def latent_scale(scaling: RopeScaling, key_length: int) -> float:
    """The factor of scores, with the squared magnitude that YaRN requires for all elements of a query. The
    log multiplier of the file is a tenth of that in Peng et al. 2023.
    """
    magnitude = scaling.attention_factor
    if scaling.kind == "yarn" and scaling.factor > 1:
        stretch = math.log(scaling.factor)
        magnitude *= 1 + (scaling.log_multiplier or 0.1) * stretch
    return magnitude * magnitude / math.sqrt(key_length)
