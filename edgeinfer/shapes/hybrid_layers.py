"""Recurrent layers and latent attention of well-known models: tensors and metadata."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Matrices = Mapping[str, tuple[int, ...]]


class Parts(NamedTuple):
    """What a layer has besides a recurrent block."""

    attention: bool
    feed_forward: bool


class RecurrentLayers(Protocol):
    """Layers of a model that have a recurrent block instead of attention."""

    def dimensions(self, name: str, length: int) -> tuple[int, ...]:
        """The shape of a vector in the file."""
        return (length,)

    def has(self, layer: int) -> bool:
        """Whether a layer is one of them."""
        ...

    def parts(self, layer: int) -> Parts:
        """What else a layer has."""
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
class DeltaNetLayers(RecurrentLayers):
    """Gated delta nets, but for every `interval`-th layer."""

    key_heads: int
    value_heads: int
    rope_dim: int
    head_dim: int = 128
    taps: int = 4
    interval: int = 4
    joined: bool = False
    """Beta and alpha are one matrix, as in Qwen3-Next."""

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    def has(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0

    def parts(self, layer: int) -> Parts:
        return Parts(attention=not self.has(layer), feed_forward=True)

    def matrices(self, width: int) -> Matrices:
        values = self.value_heads * self.head_dim
        return {
            "attn_qkv.weight": (self.channels, width),
            "attn_gate.weight": (values, width),
            **self._factors(width),
            "ssm_out.weight": (width, values),
            "ssm_conv1d.weight": (self.channels, self.taps),
        }

    def _factors(self, width: int) -> Matrices:
        if self.joined:
            return {"ssm_ba.weight": (2 * self.value_heads, width)}
        return dict.fromkeys(("ssm_beta.weight", "ssm_alpha.weight"), (self.value_heads, width))

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
class ShortConvolutionLayers(RecurrentLayers):
    """Short convolutions, but for the layers `attention`."""

    attention: tuple[int, ...]
    kv_heads: int
    taps: int = 3

    def has(self, layer: int) -> bool:
        return layer not in self.attention

    def parts(self, layer: int) -> Parts:
        return Parts(attention=not self.has(layer), feed_forward=True)

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


@dataclass(frozen=True)
class Mamba2Layers(RecurrentLayers):
    """Layers of a single block each, by the letters of `pattern`: M Mamba-2, * attention, E feed-forward."""

    pattern: str
    heads: int
    head_dim: int
    state_size: int
    groups: int
    kv_heads: int = 0
    feed_forward: int = 0
    taps: int = 4
    is_followed: bool = False
    """Each layer also has a feed-forward or experts."""

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner_size + 2 * self.groups * self.state_size

    def has(self, layer: int) -> bool:
        return self.pattern[layer] == "M"

    def dimensions(self, name: str, length: int) -> tuple[int, ...]:
        if name.endswith(("ssm_a", "ssm_d")):
            return (length, 1)
        return (self.groups, length // self.groups) if name.endswith("ssm_norm.weight") else (length,)

    def parts(self, layer: int) -> Parts:
        letter = self.pattern[layer]
        return Parts(attention=letter == "*", feed_forward=letter == "E" or self.is_followed)

    def matrices(self, width: int) -> Matrices:
        return {
            "ssm_in.weight": (self.inner_size + self.channels + self.heads, width),
            "ssm_out.weight": (width, self.inner_size),
            "ssm_conv1d.weight": (self.channels, self.taps),
        }

    def vectors(self, width: int) -> Mapping[str, int]:
        heads = dict.fromkeys(("ssm_a", "ssm_d", "ssm_dt.bias"), self.heads)
        return {"ssm_conv1d.bias": self.channels, "ssm_norm.weight": self.inner_size, **heads}

    def metadata(self, layers: int) -> Mapping[str, Any]:
        letters = self.pattern[:layers]
        return {
            "attention.layer_norm_epsilon": 1e-5,  # llama.cpp requires it, and reads the other one.
            "attention.head_count_kv": [self.kv_heads if letter == "*" else 0 for letter in letters],
            **({} if self.is_followed else {"feed_forward_length": self._lengths(letters)}),
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.groups,
            "ssm.time_step_rank": self.heads,
            "ssm.inner_size": self.inner_size,
        }

    def _lengths(self, letters: str) -> list[int]:
        return [self.feed_forward if letter == "E" else 0 for letter in letters]


@dataclass(frozen=True)
class ParallelMamba2Layers(Mamba2Layers):
    """Mamba-2 in parallel with attention in each layer, and a feed-forward; the state has no norm."""

    def parts(self, layer: int) -> Parts:
        return Parts(attention=True, feed_forward=True)

    def vectors(self, width: int) -> Mapping[str, int]:
        return {name: length for name, length in super().vectors(width).items() if name != "ssm_norm.weight"}

    def metadata(self, layers: int) -> Mapping[str, Any]:
        taken = super().metadata(layers)
        return {name: value for name, value in taken.items() if name.startswith("ssm.")}


@dataclass(frozen=True)
class MambaLayers(RecurrentLayers):
    """Mamba-1 as in Jamba, but for the layers `attention`; each layer also has a feed-forward."""

    attention: tuple[int, ...]
    inner_size: int
    state_size: int
    rank: int
    kv_heads: int
    taps: int = 4

    def has(self, layer: int) -> bool:
        return layer not in self.attention

    def parts(self, layer: int) -> Parts:
        return Parts(attention=not self.has(layer), feed_forward=True)

    def matrices(self, width: int) -> Matrices:
        return {
            "ssm_in.weight": (2 * self.inner_size, width),
            "ssm_conv1d.weight": (self.inner_size, self.taps),
            "ssm_x.weight": (self.rank + 2 * self.state_size, self.inner_size),
            "ssm_dt.weight": (self.inner_size, self.rank),
            "ssm_out.weight": (width, self.inner_size),
        }

    def vectors(self, width: int) -> Mapping[str, int]:
        return {
            **dict.fromkeys(("ssm_conv1d.bias", "ssm_dt.bias", "ssm_d"), self.inner_size),
            "ssm_a": self.inner_size * self.state_size,
            "ssm_dt_norm.weight": self.rank,
            **dict.fromkeys(("ssm_b_norm.weight", "ssm_c_norm.weight"), self.state_size),
        }

    def dimensions(self, name: str, length: int) -> tuple[int, ...]:
        return (self.inner_size, self.state_size) if name.endswith("ssm_a") else (length,)

    def metadata(self, layers: int) -> Mapping[str, Any]:
        heads = [0 if self.has(layer) else self.kv_heads for layer in range(layers)]
        return {
            "attention.head_count_kv": heads,
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.state_size,
            "ssm.inner_size": self.inner_size,
            "ssm.time_step_rank": self.rank,
        }


@dataclass(frozen=True)
class LatentHeads:
    """Latent attention (MLA): the lengths of a head's parts, of the latent and of a query's latent."""

    nope: int
    rope: int
    value: int
    latent: int
    query_rank: int

    def matrices(self, width: int, heads: int) -> Matrices:
        """As `RecurrentLayers.matrices`; those of the attention."""
        return {
            "attn_q_a.weight": (self.query_rank, width),
            "attn_q_b.weight": (heads * (self.nope + self.rope), self.query_rank),
            "attn_kv_a_mqa.weight": (self.latent + self.rope, width),
            "attn_k_b.weight": (heads, self.latent, self.nope),
            "attn_v_b.weight": (heads, self.value, self.latent),
            "attn_output.weight": (width, heads * self.value),
        }

    def vectors(self) -> Mapping[str, int]:
        """Name within the layer -> length."""
        return {"attn_q_a_norm.weight": self.query_rank, "attn_kv_a_norm.weight": self.latent}

    def metadata(self) -> Mapping[str, Any]:
        """Keys without the architecture's prefix."""
        return {
            "attention.q_lora_rank": self.query_rank,
            "attention.kv_lora_rank": self.latent,
            "attention.key_length": self.latent + self.rope,
            "attention.value_length": self.latent,
            "attention.key_length_mla": self.nope + self.rope,
            "attention.value_length_mla": self.value,
            "rope.dimension_count": self.rope,
        }
