"""The shapes of well-known models: the sizes that determine their speed, without weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from edgeinfer.benchmarking.gemma_shapes import Gemma4Layers
from edgeinfer.benchmarking.hybrid_shapes import (
    DeltaNetLayers,
    LatentHeads,
    Mamba2Layers,
    Matrices,
    Parts,
    RecurrentLayers,
    ShortConvolutionLayers,
)
from edgeinfer.errors import SettingError

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
    expert_bias: bool = False
    """The selection of experts has a bias."""
    dense_layers: int = 0
    """Number of leading layers with a dense feed-forward, of `dense_feed_forward` neurons."""
    dense_feed_forward: int = 0
    latent: LatentHeads | None = None
    recurrent: RecurrentLayers | None = None
    gemma4: Gemma4Layers | None = None
    attention_gate: bool = False
    """Each head's query is followed by a gate."""
    gated: bool = True
    """Feed-forwards have a gate."""
    feed_forward_norm: str = "ffn_norm"
    """"": a layer has one block."""
    output_norm: str = "output_norm"

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
        for index in range(self.layers):
            attention, feed_forward = self._attention_matrices(index), self._feed_forward_matrices(index)
            shapes |= self._of_layer(index, recurrent, attention, feed_forward)
        return shapes

    def _attention_matrices(self, layer: int) -> Matrices:
        if self.gemma4:
            return self.gemma4.attention(layer, self.width, self.heads, self.kv_heads, self.head_size)
        if self.latent:
            return self.latent.matrices(self.width, self.heads)
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
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

        found = sizes("", self.dense_feed_forward or self.feed_forward)
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
        recurrent = self.recurrent.vectors(self.width) if self.recurrent else {}
        lengths = {f"{self.output_norm}.weight": self.width}
        if self.gemma4:
            lengths |= self.gemma4.outside_vectors(self.head_size, self.layers)
        for index in range(self.layers):
            if self.gemma4:
                attention = dict(self.gemma4.vectors(index, self.width, self.head_size, self.experts))
            lengths[f"blk.{index}.attn_norm.weight"] = self.width
            lengths |= self._of_layer(index, recurrent, attention, self._feed_forward_vectors(index))
        return lengths

    def _feed_forward_vectors(self, layer: int) -> dict[str, int]:
        found = {f"{self.feed_forward_norm}.weight": self.width} if self.feed_forward_norm else {}
        if layer < self.dense_layers:
            return found
        if self.expert_bias:
            return found | {"exp_probs_b.bias": self.experts}
        return found | {"ffn_gate_inp_shexp.weight": self.width} if self.shared_expert else found

    @property
    def parameters(self) -> int:
        """Total number of weights."""
        matrices = sum(math.prod(size) for size in self.matrices().values())
        return matrices + sum(self.vectors().values())


def _llama3(name: str, layers: int, width: int, feed_forward: int, heads: int, tied: bool) -> Shape:
    context = 131072 if tied else 8192
    return Shape(name, layers, width, feed_forward, heads, 8, 128256, context, tied=tied, rope_base=500000.0)


def _qwen2(
    name: str, layers: int, width: int, feed_forward: int, heads: int, kv_heads: int, tied: bool
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 151936 if tied else 152064, 32768,
        architecture="qwen2", tied=tied, rope_base=1000000.0, biases=True,
    )  # fmt: skip


def _qwen3(name: str, layers: int, width: int, feed_forward: int, heads: int, tied: bool) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, 8, 151936, 40960,
        head_dim=128, architecture="qwen3", tied=tied, rope_base=1000000.0, qk_norm=True,
    )  # fmt: skip


def _qwen35(
    name: str,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 248320, 262144,
        head_dim=256, architecture="qwen35", tied=tied, rope_base=10000000.0, qk_norm=True,
        recurrent=DeltaNetLayers(16, value_heads, rope_dim=64), attention_gate=True,
        feed_forward_norm="post_attention_norm",
    )  # fmt: skip


def _gemma4(
    name: str,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    context: int,
    own: Gemma4Layers,
) -> Shape:
    return Shape(
        name, layers, width, feed_forward, heads, kv_heads, 262144, context,
        head_dim=512, architecture="gemma4", tied=True, rope_base=1000000.0, gemma4=own,
    )  # fmt: skip


_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_OLMOE = Shape(
    "olmoe-7b-a1b", 16, 2048, 1024, 16, 16, 50304, 4096, architecture="olmoe", row_norms=True,
    experts=64, experts_per_token=8,
)  # fmt: skip
_QWEN3_MOE = Shape(
    "qwen3-30b-a3b", 48, 2048, 768, 32, 4, 151936, 40960, head_dim=128, architecture="qwen3moe",
    rope_base=1000000.0, qk_norm=True, experts=128, experts_per_token=8,
)  # fmt: skip
_GLM_FLASH = Shape(
    "glm-4.7-flash", 47, 2048, 1536, 20, 1, 154880, 202752, architecture="deepseek2",
    rope_base=1000000.0, experts=64, experts_per_token=4, shared_expert=1536, expert_bias=True,
    dense_layers=1, dense_feed_forward=10240, latent=LatentHeads(192, 64, 256, 512, 768),
)  # fmt: skip
_GEMMA4_MOE = replace(
    _gemma4(
        "gemma4-26b-a4b", 30, 2816, 704, 16, 2, 262144,
        Gemma4Layers(1024, 256, 8, values_from_keys=True),
    ),
    dense_feed_forward=2112, experts=128, experts_per_token=8,
)  # fmt: skip

_ALL = (
    Shape("smollm2-135m", 30, 576, 1536, 9, 3, 49152, 8192, tied=True, rope_base=100000.0),
    _qwen2("qwen2.5-0.5b", 24, 896, 4864, 14, 2, tied=True),
    _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, tied=True),
    Shape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32000, 2048),
    _qwen35("qwen3.5-0.8b", 24, 1024, 3584, 8, 2, 16, tied=True),
    Shape(
        "lfm2-1.2b",
        16,
        2048,
        8192,
        32,
        8,
        65536,
        128000,
        architecture="lfm2",
        tied=True,
        rope_base=1000000.0,
        qk_norm=True,
        recurrent=ShortConvolutionLayers((2, 5, 8, 10, 12, 14), 8),
        output_norm="token_embd_norm",
    ),
    _llama3("llama-3.2-1b", 16, 2048, 8192, 32, tied=True),
    Shape("granite-1b-a400m", 24, 1024, 512, 16, 8, 49155, 4096, tied=True, experts=32, experts_per_token=8),
    _qwen2("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, tied=True),
    _qwen2("qwen2.5-3b", 36, 2048, 11008, 16, 2, tied=True),
    _llama3("llama-3.2-3b", 28, 3072, 8192, 24, tied=True),
    _qwen3("qwen3-4b", 36, 2560, 9728, 32, tied=True),
    _OLMOE,
    _QWEN3_MOE,
    Shape(
        "mamba2-1.3b",
        48,
        2048,
        0,
        0,
        0,
        50288,
        1048576,
        architecture="mamba2",
        tied=True,
        recurrent=Mamba2Layers("M" * 48, 64, 64, 128, 1),
        feed_forward_norm="",
    ),
    _qwen35("qwen3.5-4b", 32, 2560, 9216, 16, 4, 32, tied=True),
    _qwen35("qwen3.5-9b", 32, 4096, 12288, 16, 4, 32, tied=False),
    Shape(
        "qwen3.5-35b-a3b",
        40,
        2048,
        512,
        16,
        2,
        248320,
        262144,
        head_dim=256,
        architecture="qwen35moe",
        rope_base=10000000.0,
        qk_norm=True,
        experts=256,
        experts_per_token=8,
        shared_expert=512,
        recurrent=DeltaNetLayers(16, 32, rope_dim=64),
        attention_gate=True,
        feed_forward_norm="post_attention_norm",
    ),
    Shape(
        "nemotron-3-nano-30b-a3b",
        52,
        2688,
        1856,
        32,
        2,
        131072,
        262144,
        head_dim=128,
        architecture="nemotron_h_moe",
        experts=128,
        experts_per_token=6,
        shared_expert=3712,
        recurrent=Mamba2Layers(_NEMOTRON, 64, 64, 128, 8, kv_heads=2, feed_forward=1856),
        gated=False,
        expert_bias=True,
        feed_forward_norm="",
    ),
    _GLM_FLASH,
    _gemma4(
        "gemma4-e4b", 42, 2560, 10240, 8, 2, 131072, Gemma4Layers(512, 256, 2, own_caches=24, per_layer=256)
    ),
    _GEMMA4_MOE,
    _qwen2("qwen2.5-7b", 28, 3584, 18944, 28, 4, tied=False),
    Shape(
        "ministral-3-8b",
        34,
        4096,
        14336,
        32,
        8,
        131072,
        262144,
        head_dim=128,
        architecture="mistral3",
        rope_base=1000000.0,
    ),
    Shape("mistral-7b", 32, 4096, 14336, 32, 8, 32768, 32768, rope_base=1000000.0),
    _llama3("llama-3-8b", 32, 4096, 14336, 32, tied=False),
)

SHAPES = {shape.name: shape for shape in _ALL}


def find_shape(name: str) -> Shape:
    """The shape of that name; "NAME:LAYERS" has only the first layers. Raises `SettingError`."""
    known, colon, layers = name.lower().partition(":")
    shape = SHAPES.get(known)
    if shape is None:
        raise SettingError(f"shape: saw {known!r}, wanted one of {', '.join(SHAPES)}")
    if not colon:
        return shape
    if not layers.isdecimal() or not 0 < int(layers) <= shape.layers:
        raise SettingError(f"shape: saw {layers!r} layers of {known}, wanted 1 to {shape.layers}")
    return replace(shape, name=f"{known}-{int(layers)}-layers", layers=int(layers))
