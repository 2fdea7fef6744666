"""Gemma 4's layers: tensors and metadata that differ from those of other models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.shapes.hybrid_layers import Matrices

INTERVAL = 6
"""Every sixth layer has no window."""
WINDOW_ROPE_BASE = 10000.0
LOGIT_SOFT_CAP = 30.0
EXPERT_STACKS = ("ffn_gate_exps.weight", "ffn_up_exps.weight")


@dataclass(frozen=True)
class Gemma4Layers:
    """Layers with windows, but for every `interval`-th, whose heads have another size.

    `window_head_dim`, `window_kv_heads`: of layers with windows. `own_caches`: number of first layers with
    keys and values; 0: all. `per_layer`: elements of a layer's input from the per-layer embeddings; 0: there
    are none. `values_from_keys`: layers without a window have no `attn_v`. `doubled`: layers without keys
    have feed-forwards of twice the neurons.
    """

    window: int
    window_head_dim: int
    window_kv_heads: int
    own_caches: int = 0
    per_layer: int = 0
    values_from_keys: bool = False
    interval: int = INTERVAL
    doubled: bool = False

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0

    def times(self, layer: int) -> int:
        """How many times the neurons of the first layer a layer has."""
        return 2 if self.doubled and not self.has_keys(layer) else 1

    def has_keys(self, layer: int) -> bool:
        return not self.own_caches or layer < self.own_caches

    def attention(self, layer: int, width: int, heads: int, kv_heads: int, head_dim: int) -> Matrices:
        """The matrices of a layer's attention; `kv_heads`, `head_dim`: of layers without a window."""
        if self.has_window(layer):
            kv_heads, head_dim = self.window_kv_heads, self.window_head_dim
        q, kv = heads * head_dim, kv_heads * head_dim
        found: dict[str, tuple[int, ...]] = {"attn_q.weight": (q, width)}
        if self.has_keys(layer):
            found["attn_k.weight"] = (kv, width)
            if self.has_window(layer) or not self.values_from_keys:
                found["attn_v.weight"] = (kv, width)
        return {**found, "attn_output.weight": (width, q)}

    def feed_forward(self, width: int, others: Matrices, dense: int) -> Matrices:
        """The matrices after those of attention; `others`: of a feed-forward or of experts, besides which
        there is a feed-forward of `dense` neurons.
        """
        found = dict(others)
        if EXPERT_STACKS[0] in found:
            (experts, neurons, _), _ = (found.pop(name) for name in EXPERT_STACKS)
            found["ffn_gate_up_exps.weight"] = experts, 2 * neurons, width
            found |= dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (dense, width))
            found["ffn_down.weight"] = width, dense
        if self.per_layer:
            found |= {"inp_gate.weight": (self.per_layer, width), "proj.weight": (width, self.per_layer)}
        return found

    def outside(self, width: int, layers: int, vocabulary: int) -> Matrices:
        """Name -> size of the matrices outside the layers, besides embedding and head."""
        columns = layers * self.per_layer
        if not columns:
            return {}
        return {
            "per_layer_token_embd.weight": (vocabulary, columns),
            "per_layer_model_proj.weight": (columns, width),
        }

    def outside_vectors(self, head_dim: int, layers: int) -> Mapping[str, int]:
        """Name -> length of the vectors outside the layers; only layers without a window read RoPE's."""
        own = {"per_layer_proj_norm.weight": self.per_layer} if self.per_layer else {}
        return {**({"rope_freqs.weight": head_dim // 2} if layers >= self.interval else {}), **own}

    def vectors(self, layer: int, width: int, head_dim: int, experts: int) -> Mapping[str, int]:
        """Name within the layer -> length."""
        head_dim = self.window_head_dim if self.has_window(layer) else head_dim
        norms = ["post_attention_norm", "post_ffw_norm", *(["post_norm"] if self.per_layer else [])]
        if experts:
            norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"]
        found = {"attn_q_norm.weight": head_dim, "layer_output_scale.weight": 1}
        found |= {f"{name}.weight": width for name in norms}
        if self.has_keys(layer):
            found["attn_k_norm.weight"] = head_dim
        if experts:
            found |= {"ffn_gate_inp.scale": width, "ffn_down_exps.scale": experts}
        return found

    def metadata(self, layers: int, kv_heads: int) -> Mapping[str, Any]:
        """Keys without the architecture's prefix."""
        windows = [self.has_window(layer) for layer in range(layers)]
        return {
            "attention.head_count_kv": [self.window_kv_heads if each else kv_heads for each in windows],
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": windows,
            "attention.key_length_swa": self.window_head_dim,
            "attention.value_length_swa": self.window_head_dim,
            "rope.dimension_count_swa": self.window_head_dim,
            "rope.freq_base_swa": WINDOW_ROPE_BASE,
            "attention.shared_kv_layers": max(0, layers - self.own_caches) if self.own_caches else 0,
            "embedding_length_per_layer_input": self.per_layer,
            "final_logit_softcapping": LOGIT_SOFT_CAP,
        }
