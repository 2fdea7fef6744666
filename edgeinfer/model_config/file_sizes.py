"""Model sizes from a file's metadata and tensor index; no weights are read.

Supports grouped-query attention with a dense feed-forward or with experts, for any architecture with these
tensor names, including architectures that edgeinfer doesn't run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.weights import embedding_rows
from edgeinfer_kernels.sizes.model_sizes import (
    ExpertSizes,
    FeedForwardSizes,
    LayerSizes,
    MatrixSize,
    ModelSizes,
    stacked_bias,
)
from edgeinfer_kernels.specification import ExpertsSpecification
from edgeinfer_quant_formats import GGUFFile, TensorInfo
from edgeinfer_quant_formats.errors import printable

_ATTENTION_VECTORS = (
    "attn_output.bias",
    "attn_norm.weight",
    "attn_norm.bias",
    "post_attention_norm.weight",
    "attn_q_norm.weight",
    "attn_k_norm.weight",
    "attn_sinks.weight",
)
_FEED_FORWARD_VECTORS = ("ffn_down.bias", "ffn_norm.weight", "ffn_norm.bias", "post_ffw_norm.weight")
_EXPERT_BIASES = ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias")
MAX_LAYERS = 4096


def file_sizes(file: GGUFFile, config: ModelConfig | None) -> ModelSizes:
    """The sizes of the file's model; `config` None: unsupported architecture, generic keys are read.

    Raises:
        UnsupportedModelError: no language model, or one with other components.
    """
    return _Reader(file, config).sizes()


class _Reader:
    def __init__(self, file: GGUFFile, config: ModelConfig | None) -> None:
        self._tensors = file.tensors
        self._metadata: Mapping[str, Any] = file.metadata
        self._architecture = printable(file.metadata.get("general.architecture", "(none)"))
        self._vocabulary = embedding_rows(file)
        self._specification = config.specification() if config else None
        self._tables: dict[Any, int] = {}

    def sizes(self) -> ModelSizes:
        embedding = self._matrix("token_embd.weight")
        tied = "output.weight" not in self._tensors
        count = self._count("block_count")
        if not 1 <= count <= MAX_LAYERS:
            raise self._wrong("block_count", count, f"1 to {MAX_LAYERS}")
        return ModelSizes(
            width=embedding.columns,
            vocabulary=self._vocabulary,
            layers=tuple(self._layer(index) for index in range(count)),
            head=embedding if tied else self._matrix("output.weight"),
            embedding=None if tied else embedding,
            vectors=self._lengths("", ("output_norm.weight", "output_norm.bias")),
        )

    def _wrong(self, key: str, seen: object, wanted: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._architecture}.{key}: {printable(str(seen))}, wanted {wanted}")

    def _count(self, key: str, layer: int = 0, default: int | None = None) -> int:
        """An integer, or the layer's entry of an array."""
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, np.ndarray) and layer < len(value):
            value = value[layer].item()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "missing" if value is None else value, "a whole number")
        return value

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise UnsupportedModelError(
                f"{name} is missing: {self._architecture} isn't built of attention and feed-forwards that a "
                "plan knows"
            )
        return info

    def _matrix(self, name: str) -> MatrixSize:
        info = self._info(name)
        if len(info.shape) != 2:
            raise UnsupportedModelError(f"{name}: shape {info.shape}, wanted rows and columns")
        return MatrixSize(name, info.format.name, *info.shape)

    def _lengths(self, prefix: str, names: Sequence[str]) -> tuple[int, ...]:
        """Lengths of the existing vectors."""
        found = [self._tensors.get(prefix + name) for name in names]
        return tuple(int(np.prod(info.shape)) for info in found if info)

    def _layer(self, index: int) -> LayerSizes:
        prefix = f"blk.{index}."
        heads, kv_heads, head_dim, window, table = self._attention_facts(index)
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        q, k, v = self._projections(prefix, rows)
        biased = any(f"{prefix}attn_{part}.bias" in self._tensors for part in ("q", "k", "v", "qkv"))
        mixture = f"{prefix}ffn_gate_inp.weight" in self._tensors
        vectors = self._lengths(prefix, _ATTENTION_VECTORS)
        if mixture:
            vectors += self._lengths(prefix, _FEED_FORWARD_VECTORS)
        return LayerSizes(
            heads,
            kv_heads,
            head_dim,
            q,
            k,
            v,
            self._matrix(f"{prefix}attn_output.weight"),
            (*(stacked_bias(rows) if biased else ()), *vectors),
            window,
            table,
            None if mixture else self._feed_forward(prefix),
            self._experts(prefix, index) if mixture else None,
        )

    def _attention_facts(self, index: int) -> tuple[int, int, int, int, int]:
        """Heads, key-value heads, head dimension, window, and index of the RoPE table."""
        if self._specification:
            facts = self._specification.layers[index].attention
            table = self._tables.setdefault((facts.rope, facts.head_dim), len(self._tables))
            return facts.heads, facts.kv_heads, facts.head_dim, facts.window, table
        heads = self._count("attention.head_count", index)
        if not heads:
            raise self._wrong("attention.head_count", heads, "heads in every layer")
        kv_heads = self._count("attention.head_count_kv", index, heads) or heads
        width = self._info("token_embd.weight").shape[1]
        return heads, kv_heads, self._count("attention.key_length", index, width // heads), 0, 0

    def _projections(self, prefix: str, rows: Sequence[int]) -> list[MatrixSize]:
        """q, k and v: three tensors, or row ranges of one."""
        name = f"{prefix}attn_qkv.weight"
        if name not in self._tensors:
            return [self._matrix(f"{prefix}attn_{part}.weight") for part in "qkv"]
        fused = self._matrix(name)
        return [MatrixSize(name, fused.format, count, fused.columns) for count in rows]

    def _feed_forward(self, prefix: str, ending: str = "") -> FeedForwardSizes:
        """A dense feed-forward; with the ending "_shexp", the shared expert."""
        up, down = (self._matrix(f"{prefix}ffn_{part}{ending}.weight") for part in ("up", "down"))
        gate = f"{prefix}ffn_gate{ending}.weight"
        found: MatrixSize | None = None
        if gate in self._tensors:
            found = self._matrix(gate)
        elif up.rows == 2 * down.columns:  # gate and up are one tensor
            up = found = MatrixSize(up.name, up.format, down.columns, up.columns)
        return FeedForwardSizes(
            up,
            down,
            found,
            () if ending else self._lengths(prefix, _FEED_FORWARD_VECTORS),
            any(f"{prefix}ffn_{part}{ending}.bias" in self._tensors for part in ("gate", "up")),
            not ending and f"{prefix}post_ffw_norm.weight" in self._tensors,
        )

    def _experts(self, prefix: str, index: int) -> ExpertSizes:
        fused = f"{prefix}ffn_gate_up_exps.weight"
        parts = {part: self._stack(f"{prefix}ffn_{part}_exps.weight") for part in ("gate", "up", "down")}
        if fused in self._tensors:
            both = self._stack(fused)
            assert both is not None
            half = MatrixSize(fused, both.format, both.rows // 2, both.columns)
            parts["gate"] = parts["up"] = half
        up, down = parts["up"], parts["down"]
        if up is None or down is None:
            raise UnsupportedModelError(
                f"{prefix}ffn_up_exps.weight is missing: wanted experts in one tensor"
            )
        count, used = self._count("expert_count"), self._count("expert_used_count")
        if not 1 <= used <= count or self._info(down.name).shape[0] != count:
            raise self._wrong("expert_count", count, f"that of {down.name}, of which {used} are used")
        biases = self._lengths(prefix, _EXPERT_BIASES)
        return ExpertSizes(
            count,
            used,
            FeedForwardSizes(up, down, parts["gate"], tuple(length // count for length in biases)),
            self._matrix(f"{prefix}ffn_gate_inp.weight"),
            self._feed_forward(prefix, "_shexp") if f"{prefix}ffn_up_shexp.weight" in self._tensors else None,
            self._routes_early(index),
            f"{prefix}ffn_gate_inp.bias" in self._tensors,
            f"{prefix}ffn_gate_inp_shexp.weight" in self._tensors,
        )

    def _routes_early(self, index: int) -> bool:
        facts = self._specification.layers[index].feed_forward if self._specification else None
        return isinstance(facts, ExpertsSpecification) and facts.early

    def _stack(self, name: str) -> MatrixSize | None:
        """The size of one of the experts' matrices in a tensor; None: there is no such tensor."""
        info = self._tensors.get(name)
        if info is None:
            return None
        if len(info.shape) != 3:
            raise UnsupportedModelError(f"{name}: shape {info.shape}, wanted experts, rows and columns")
        return MatrixSize(name, info.format.name, *info.shape[1:])
