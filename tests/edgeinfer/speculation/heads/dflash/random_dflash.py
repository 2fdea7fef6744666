"""Small files of block drafters with seeded random weights, in the layout of llama.cpp's converter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer_quant_formats import GGUFWriter
from tests.edgeinfer.speculation.heads.head_files import add_tensors, drafted_ids
from tests.random_models import VOCABULARY, vocabulary_metadata

MASK = 4


@dataclass(frozen=True)
class RandomDFlash:
    """A drafter for a target of the same `width`, after the layers `target_layers`.

    `rows`: of its output, with as many ids in `d2t`; 0: it has no d2t. `own_tables`: it has an embedding and
    an output. `rank`: of its Markov head; 0: there is none. `windows`: which of its layers have one.
    """

    width: int = 64
    layers: int = 2
    target_layers: tuple[int, ...] = (1, 2, 4)
    own_tables: bool = False
    rows: int = 0
    rank: int = 0
    windows: tuple[bool, ...] = ()
    with_values: bool = True
    with_post_norms: bool = False
    with_sinks: bool = False
    selector_rank: int = 0
    """That of DFlash 2; 0: there is no selector, and there are no convolutions."""
    format: str = "F32"
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    """Names of tensors that the file lacks."""
    seed: int = 0

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96
    block_size: int = 6

    def write(self, path: Path) -> Path:
        """Write the file."""
        random = np.random.default_rng(self.seed)
        with GGUFWriter(path, self.metadata()) as writer:
            tensors = {name: shape for name, shape in self.tensors().items() if name not in self.missing}
            add_tensors(writer, tensors, self.format, random)
            if self.rows:
                writer.add_tensor("d2t", self.ids(), "I64")
        return path

    def ids(self) -> np.ndarray:
        """The token ids of the rows of its output."""
        if not self.rows:
            return np.arange(VOCABULARY)
        return drafted_ids(self.rows, self.seed)

    def metadata(self) -> dict[str, Any]:
        """The keys that llama.cpp's converter writes."""
        own = {
            "block_count": self.layers,
            "context_length": 256,
            "embedding_length": self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": 10000.0,
            "feed_forward_length": self.feed_forward,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "target_layers": np.array(self.target_layers, np.int32),
            "block_size": self.block_size,
        }
        if self.windows:
            own |= {"attention.sliding_window": 7}
            own |= {"attention.sliding_window_pattern": np.array(self.windows, np.bool_)}
        if self.selector_rank:
            own |= {"conv_kernel_size": 3, "conv_group_size": 16}
            own |= {"selector_rank": self.selector_rank, "selector_top_k": 5}
        keys = {f"dflash.{key}": value for key, value in (own | dict(self.extra)).items()}
        mask = {"tokenizer.ggml.mask_token_id": MASK}
        return {"general.architecture": "dflash", **keys, **vocabulary_metadata(), **mask}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor with random values."""
        width, rows = self.width, self.rows or VOCABULARY
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.target_layers) * width),
            "enc.output_norm.weight": (width,),
            "output_norm.weight": (width,),
        }
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self.layer_tensors().items()}
        if self.own_tables:
            shapes["token_embd.weight"] = (VOCABULARY, width)
        if self.own_tables or self.rows:
            shapes["output.weight"] = (rows, width)
        if self.rank:
            shapes["markov_w1.weight"] = (VOCABULARY, self.rank)
            shapes["markov_w2.weight"] = (rows, self.rank)
            shapes["conf_proj.weight"] = (1, width + self.rank)
            shapes["conf_proj.bias"] = (1,)
        if self.selector_rank:
            rank = self.selector_rank
            shapes["selector_hidden.weight"] = (rank, width)
            shapes |= {f"selector_{name}.weight": (VOCABULARY, rank) for name in ("predecessor", "successor")}
        return shapes

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Those of one layer."""
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (q, width),
            "attn_k.weight": (kv, width),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
            "attn_output.weight": (width, q),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (self.feed_forward, width),
            "ffn_up.weight": (self.feed_forward, width),
            "ffn_down.weight": (width, self.feed_forward),
        }
        if self.with_values:
            shapes["attn_v.weight"] = (kv, width)
        if self.with_post_norms:
            shapes |= {f"{name}.weight": (width,) for name in ("post_attention_norm", "post_ffw_norm")}
            shapes["layer_output_scale.weight"] = (1,)
        if self.with_sinks:
            shapes["attn_sinks.weight"] = (self.heads,)
        for name in ("attn", "ffn") if self.selector_rank else ():
            shapes[f"{name}_conv_base"] = (2, 3, width)
            shapes[f"{name}_conv_proj.weight"] = (2 * 3 * width // 16, width)
        return shapes


VARIANTS: dict[str, RandomDFlash] = {
    "plain": RandomDFlash(own_tables=True),
    "causal": RandomDFlash(own_tables=True, extra={"attention.causal": True}),
    "windows": RandomDFlash(own_tables=True, windows=(True, False)),
    "ids": RandomDFlash(own_tables=True, rows=96),
    "gemma": RandomDFlash(
        own_tables=True,
        with_values=False,
        with_post_norms=True,
        extra={"hidden_activation": "gelu_pytorch_tanh", "embedding_scale": 8.0, "attention.scale": 1.0},
    ),
    "mimo": RandomDFlash(own_tables=True, with_sinks=True, extra={"attention.value_scale": 0.7}),
    "partial-rope": RandomDFlash(own_tables=True, extra={"rope.dimension_count": 8}),
    "sections": RandomDFlash(
        own_tables=True, extra={"rope.dimension_sections": np.array([8, 0, 0, 0], np.int32)}
    ),
    "selector": RandomDFlash(
        own_tables=True,
        selector_rank=16,
        extra={"logit_scale": 0.7, "final_logit_softcapping": 20.0},
    ),
    "selector-ids": RandomDFlash(own_tables=True, rows=96, selector_rank=16),
    "markov": RandomDFlash(own_tables=True, rank=16),
    "markov-after-first": RandomDFlash(
        own_tables=True, rank=16, rows=96, extra={"sample_from_anchor": False}
    ),
}
"""Drafters of the kinds that llama.cpp's converters write."""
