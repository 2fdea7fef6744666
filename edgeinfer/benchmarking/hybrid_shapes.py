"""The recurrent layers of well-known hybrid models: tensors and metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Matrices = Mapping[str, tuple[int, ...]]


class RecurrentLayers(Protocol):
    """Layers of a model that have a recurrent block instead of attention."""

    def has(self, layer: int) -> bool:
        """Whether a layer is one of them."""
        ...

    def matrices(self, width: int) -> Matrices:
        """Name within the layer -> (rows, columns), in the order of the file."""
        ...

    def vectors(self, width: int) -> Mapping[str, int]:
        """Name within the layer -> length; small tensors in float32 among them."""
        ...

    def metadata(self, layers: int) -> Mapping[str, Any]:
        """Keys without the architecture's prefix."""
        ...


@dataclass(frozen=True)
class DeltaNetLayers:
    """Gated delta nets, but for every `interval`-th layer."""

    key_heads: int
    value_heads: int
    rope_dim: int
    head_dim: int = 128
    taps: int = 4
    interval: int = 4

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    def has(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0

    def matrices(self, width: int) -> Matrices:
        values = self.value_heads * self.head_dim
        return {
            "attn_qkv.weight": (self.channels, width),
            "attn_gate.weight": (values, width),
            "ssm_beta.weight": (self.value_heads, width),
            "ssm_alpha.weight": (self.value_heads, width),
            "ssm_out.weight": (width, values),
            "ssm_conv1d.weight": (self.channels, self.taps),
        }

    def vectors(self, width: int) -> Mapping[str, int]:
        return {"ssm_a": self.value_heads, "ssm_dt.bias": self.value_heads, "ssm_norm.weight": self.head_dim}

    def metadata(self, layers: int) -> Mapping[str, Any]:
        third = self.rope_dim // 2 // 3 + 1
        sections = [third, third, self.rope_dim // 2 - 2 * third, 0]
        return {
            "full_attention_interval": self.interval,
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.head_dim,
            "ssm.group_count": self.key_heads,
            "ssm.time_step_rank": self.value_heads,
            "ssm.inner_size": self.value_heads * self.head_dim,
            "rope.dimension_count": self.rope_dim,
            "rope.dimension_sections": sections,
        }


@dataclass(frozen=True)
class ShortConvolutionLayers:
    """Short convolutions, but for the layers `attention`."""

    attention: tuple[int, ...]
    kv_heads: int
    taps: int = 3

    def has(self, layer: int) -> bool:
        return layer not in self.attention

    def matrices(self, width: int) -> Matrices:
        return {
            "shortconv.in_proj.weight": (3 * width, width),
            "shortconv.out_proj.weight": (width, width),
            "shortconv.conv.weight": (width, self.taps),
        }

    def vectors(self, width: int) -> Mapping[str, int]:
        return {}

    def metadata(self, layers: int) -> Mapping[str, Any]:
        heads = [self.kv_heads if layer in self.attention else 0 for layer in range(layers)]
        return {"attention.head_count_kv": heads, "shortconv.l_cache": self.taps}
