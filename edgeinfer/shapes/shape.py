"""The shape of a model: the sizes that determine its speed and memory, without weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgeinfer.shapes.encoder_layers import EncoderLayers
from edgeinfer.shapes.gemma4_layers import Gemma4Layers
from edgeinfer.shapes.hybrid_layers import (
    LatentHeads,
    Matrices,
    Parts,
    RecurrentLayers,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with gated feed-forward and RoPE; head_dim 0: hidden_size / heads.

    With `experts` the feed-forward is a MoE with that many experts, each of size `feed_forward`.
    """

    name: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    head_dim: int = 0
    architecture: str = "llama"
    tied: bool = False
    """The embedding is also the output head."""
    rope_base: float = 10000.0
    biases: bool = False
    """Query, key and value projections have biases."""
    qk_norm: bool = False
    """RMSNorm on the queries and keys of each head."""
    row_norms: bool = False
    """RMSNorm on whole rows of queries and keys."""
    experts: int = 0
    experts_per_token: int = 0
    shared_expert: int = 0
    """Size of a shared expert, which has a gate unless experts have a bias; 0: there is none."""
    shared_gate: bool = True
    expert_bias: bool = False
    """The selection of experts has a bias."""
    dense_layers: int = 0
    """Number of leading layers with a dense feed-forward, of `dense_feed_forward` neurons."""
    dense_feed_forward: int = 0
    latent: LatentHeads | None = None
    recurrent: RecurrentLayers | None = None
    gemma4: Gemma4Layers | None = None
    encoder: EncoderLayers | None = None
    fused: bool = False
    """Queries, keys and values are one matrix; so are gate and up, unless the model has experts."""
    post_norms: bool = False
    """RMSNorm after attention and after the feed-forward."""
    pre_norms: bool = True
    all_biases: bool = False
    """All matrices of the layers have biases, and heads have attention sinks."""
    keys: tuple[tuple[str, Any], ...] = ()
    """More metadata, without the architecture's prefix."""
    attention_gate: bool = False
    """Each head's query is followed by a gate."""
    gated: bool = True
    """Feed-forwards have a gate."""
    feed_forward_norm: str = "ffn_norm"
    """"": a layer has one block."""
    output_norm: str = "output_norm"
    draft_head: bool = False
    """A draft head (MTP) follows the last layer: one more layer with attention."""

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // max(1, self.heads)

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Name -> (rows, columns), for experts (experts, rows, columns), of every matrix, in the order of the
        file.
        """
        recurrent = self.recurrent.matrices(self.width) if self.recurrent else {}
        head = (self.vocabulary, self.width)
        names = ["token_embd.weight"] if self.tied else ["token_embd.weight", "output.weight"]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, head)
        if self.gemma4:
            shapes |= self.gemma4.outside(self.width, self.layers, self.vocabulary)
        if self.encoder:
            shapes |= self.encoder.outside(self.width)
        for index in range(self.layers):
            attention, feed_forward = self._attention_matrices(index), self._feed_forward_matrices(index)
            shapes |= self._of_layer(index, recurrent, attention, feed_forward)
        if self.draft_head:
            pair: Matrices = {"nextn.eh_proj.weight": (self.width, 2 * self.width)}
            found = pair, self._attention_matrices(self.layers), self._feed_forward_matrices(self.layers)
            shapes |= {f"blk.{self.layers}.{name}": size for part in found for name, size in part.items()}
        return shapes

    def _attention_matrices(self, layer: int) -> Matrices:
        if self.gemma4:
            return self.gemma4.attention(layer, self.width, self.heads, self.kv_heads, self.head_size)
        if self.latent:
            return self.latent.matrices(self.width, self.heads)
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        if self.fused:
            return {"attn_qkv.weight": (q + 2 * kv, self.width), "attn_output.weight": (self.width, q)}
        return {
            "attn_q.weight": (q * (2 if self.attention_gate else 1), self.width),
            "attn_k.weight": (kv, self.width),
            "attn_v.weight": (kv, self.width),
            "attn_output.weight": (self.width, q),
        }

    def _of_layer(
        self, layer: int, recurrent: Mapping[str, T], attention: Mapping[str, T], others: Mapping[str, T]
    ) -> dict[str, T]:
        """The tensors of a layer, of those of each kind of block; `others`: of a feed-forward."""
        parts = self.recurrent.parts(layer) if self.recurrent else Parts(attention=True, feed_forward=True)
        tensors = {
            **(recurrent if self.recurrent and self.recurrent.has(layer) else {}),
            **(attention if parts.attention else {}),
            **(others if parts.feed_forward else {}),
        }
        return {f"blk.{layer}.{name}": size for name, size in tensors.items()}

    def _feed_forward_matrices(self, layer: int) -> Matrices:
        experts = self.experts if layer >= self.dense_layers else 0
        parts = ("gate", "up", "down") if self.gated else ("up", "down")

        def sizes(name: str, neurons: int, *count: int) -> Matrices:
            return {
                f"ffn_{part}{name}.weight": (
                    *count,
                    *((self.width, neurons) if part == "down" else (neurons, self.width)),
                )
                for part in parts
            }

        neurons = (self.dense_feed_forward or self.feed_forward) * (
            self.gemma4.times(layer) if self.gemma4 else 1
        )
        if self.fused and self.gated and not self.encoder:
            return {"ffn_up.weight": (2 * neurons, self.width), "ffn_down.weight": (self.width, neurons)}
        found = sizes("", neurons)
        if experts:
            router = {"ffn_gate_inp.weight": (experts, self.width)}
            shared = sizes("_shexp", self.shared_expert) if self.shared_expert else {}
            found = {**router, **sizes("_exps", self.feed_forward, experts), **shared}
        return self.gemma4.feed_forward(self.width, found, self.dense_feed_forward) if self.gemma4 else found

    def vectors(self) -> dict[str, int]:
        """Name -> length of every vector."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention: dict[str, int] = {}
        if self.biases:
            attention |= {"attn_q.bias": q, "attn_k.bias": kv, "attn_v.bias": kv}
        if self.qk_norm:
            attention |= {"attn_q_norm.weight": self.head_size, "attn_k_norm.weight": self.head_size}
        if self.row_norms:
            attention |= {"attn_q_norm.weight": q, "attn_k_norm.weight": kv}
        if self.latent:
            attention |= self.latent.vectors()
        if self.post_norms:
            attention["post_attention_norm.weight"] = self.width
        if self.all_biases:
            sizes = {"q": q, "k": kv, "v": kv, "output": self.width}
            attention |= {f"attn_{part}.bias": length for part, length in sizes.items()}
            attention |= {} if self.encoder else {"attn_sinks.weight": self.heads}
        recurrent = self.recurrent.vectors(self.width) if self.recurrent else {}
        lengths = {f"{self.output_norm}.weight": self.width} if self.output_norm else {}
        if self.encoder:
            lengths |= self.encoder.outside_vectors(self.width)
        if self.gemma4:
            lengths |= self.gemma4.outside_vectors(self.head_size, self.layers)
        for index in range(self.layers):
            if self.gemma4:
                attention = dict(self.gemma4.vectors(index, self.width, self.head_size, self.experts))
            if self.pre_norms:
                lengths[f"blk.{index}.attn_norm.weight"] = self.width
            lengths |= self._of_layer(index, recurrent, attention, self._feed_forward_vectors(index))
        if self.draft_head:
            norms = ("attn_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
            own = dict.fromkeys((f"{norm}.weight" for norm in norms), self.width)
            found = own | attention | self._feed_forward_vectors(self.layers)
            lengths |= {f"blk.{self.layers}.{name}": length for name, length in found.items()}
        return lengths

    def _feed_forward_vectors(self, layer: int) -> dict[str, int]:
        has_norm = self.feed_forward_norm and self.pre_norms
        found = {f"{self.feed_forward_norm}.weight": self.width} if has_norm else {}
        if self.post_norms:
            found["post_ffw_norm.weight"] = self.width
        if self.encoder and self.encoder.normed_sums:
            found |= self.encoder.norms(self.width)
        if self.all_biases:
            found |= self._feed_forward_biases()
        if layer < self.dense_layers:
            return found
        if self.expert_bias:
            return found | {"exp_probs_b.bias": self.experts}
        return (
            found | {"ffn_gate_inp_shexp.weight": self.width}
            if self.shared_expert and self.shared_gate
            else found
        )

    def _feed_forward_biases(self) -> dict[str, int]:
        parts = {"gate": self.feed_forward, "up": self.feed_forward, "down": self.width}
        if not self.gated:
            del parts["gate"]
        if not self.experts:
            return {f"ffn_{part}.bias": length for part, length in parts.items()}
        experts = {f"ffn_{part}_exps.bias": self.experts * length for part, length in parts.items()}
        return {"ffn_gate_inp.bias": self.experts, **experts}

    @property
    def parameters(self) -> int:
        """Total number of weights."""
        matrices = sum(math.prod(size) for size in self.matrices().values())
        return matrices + sum(self.vectors().values())
