"""Small files of EAGLE-3 heads with seeded random weights, in the layout of llama.cpp's converter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer_quant_formats import GGUFWriter
from tests.edgeinfer.speculation.heads.head_files import add_tensors, drafted_ids
from tests.random_models import VOCABULARY, vocabulary_metadata


@dataclass(frozen=True)
class RandomEagle:
    """A head for a target of `target_width`, after the layers `target_layers`.

    `rows`: of its output, with as many ids in `d2t`; 0: it has the target's. `own_table`: it has an
    embedding.
    """

    target_width: int = 64
    width: int = 64
    target_layers: tuple[int, ...] = (0, 1, 3)
    rows: int = 96
    own_table: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    format: str = "F32"
    extra: Mapping[str, Any] = field(default_factory=dict)
    given_ids: tuple[int, ...] = ()
    """Those of `d2t`, instead of random ones."""
    seed: int = 0

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96

    def write(self, path: Path) -> Path:
        """Write the file."""
        random = np.random.default_rng(self.seed)
        with GGUFWriter(path, self.metadata()) as writer:
            add_tensors(writer, self.tensors(), self.format, random)
            if self.rows:
                writer.add_tensor("d2t", self.ids(), "I64")
        return path

    def ids(self) -> np.ndarray:
        """The token ids of the rows of its output."""
        if self.given_ids:
            return np.array(self.given_ids, np.int64)
        return drafted_ids(self.rows, self.seed)

    def metadata(self) -> dict[str, Any]:
        """The keys that llama.cpp's converter writes."""
        own = {
            "block_count": 1,
            "context_length": 256,
            "embedding_length": self.width,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "feed_forward_length": self.feed_forward,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "target_layers": np.array(self.target_layers, np.int32),
            "target_hidden_size": self.target_width,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            **self.extra,
        }
        keys = {f"eagle3.{key}": value for key, value in own.items()}
        return {"general.architecture": "eagle3", **keys, **vocabulary_metadata()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor with random values."""
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        features = len(self.target_layers) * self.target_width
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, features),
            "blk.0.attn_norm.weight": (width,),
            "blk.0.attn_norm_2.weight": (width,),
            "blk.0.attn_q.weight": (q, 2 * width),
            "blk.0.attn_k.weight": (kv, 2 * width),
            "blk.0.attn_v.weight": (kv, 2 * width),
            "blk.0.attn_output.weight": (width, q),
            "blk.0.ffn_norm.weight": (width,),
            "blk.0.ffn_gate.weight": (self.feed_forward, width),
            "blk.0.ffn_up.weight": (self.feed_forward, width),
            "blk.0.ffn_down.weight": (width, self.feed_forward),
            "output_norm.weight": (width,),
        }
        if self.rows:
            shapes["output.weight"] = (self.rows, width)
        if self.own_table:
            shapes["token_embd.weight"] = (VOCABULARY, width)
        if self.norm_before_fc:
            shapes["enc.output_norm.weight"] = (features,)
        return shapes
