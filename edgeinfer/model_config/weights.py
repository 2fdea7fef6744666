"""Reads a GGUF file's tensors as weights for the backends; checks every name and shape."""

from collections.abc import Sequence

import numpy as np

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.experts_config import ExpertsConfig
from edgeinfer.model_config.rope_scaling import Factors
from edgeinfer_kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    LayerWeights,
    Matrix,
    Vector,
)
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.scale_fields import non_finite_error

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def rope_factors(file: GGUFFile, config: ModelConfig, context: int) -> Factors | None:
    """The file's divisors of the RoPE frequencies, (rope_dim/2,) float32.

    LongRoPE has two sets, selected by the context in use.

    Raises:
        UnsupportedModelError: not one factor per pair, or one that isn't above 0.
    """
    long_context = context > config.rope_scaling.original_context
    name = "rope_factors_long.weight" if long_context else "rope_factors_short.weight"
    if "rope_freqs.weight" in file.tensors:
        name = "rope_freqs.weight"
    if name not in file.tensors:
        return None
    factors = file.decode(name).reshape(-1)
    if len(factors) != config.rope_dim // 2:
        raise UnsupportedModelError(f"{name}: {len(factors)} factors, wanted {config.rope_dim // 2}")
    wrong = factors[~(np.isfinite(factors) & (factors > 0))]
    if len(wrong):
        raise UnsupportedModelError(f"{name}: a factor of {wrong[0]}, wanted finite numbers above 0")
    return factors


class WeightReader:
    """Reads tensors of a file by name; unused tensors are an error at the end."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._taken = set(ROPE_TENSORS)

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The tensor `name`.weight with this shape, in the file's format."""
        found = self.matrix_or_none(name, rows, columns)
        if found is None:
            raise UnsupportedModelError(
                f"{name}.weight is missing: architecture {self._config.architecture} needs it"
            )
        return found

    def matrix_or_none(self, name: str, rows: int, columns: int) -> Matrix | None:
        full = f"{name}.weight"
        if full not in self._file.tensors:
            return None
        info = self._file.tensors[full]
        if info.shape != (rows, columns):
            raise UnsupportedModelError(f"{full}: shape {info.shape}, wanted {(rows, columns)}")
        self._taken.add(full)
        return Matrix(full, info.format.name, rows, columns, self._file.raw(full).reshape(rows, -1))

    def experts(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        """The tensor `name`.weight of (count, rows, columns): one matrix per expert."""
        full = f"{name}.weight"
        info = self._file.tensors.get(full)
        if info is None:
            raise UnsupportedModelError(
                f"{full} is missing: architecture {self._config.architecture} with experts needs it"
            )
        if info.shape != (count, rows, columns):
            raise UnsupportedModelError(f"{full}: shape {info.shape}, wanted {(count, rows, columns)}")
        self._taken.add(full)
        raw = self._file.raw(full).reshape(count * rows, -1)
        return Matrix(full, info.format.name, rows, columns, raw, count)

    def vector(self, name: str, length: int) -> Vector | None:
        """The tensor `name` in float32, or None if the file has none."""
        if name not in self._file.tensors:
            return None
        info = self._file.tensors[name]
        if int(np.prod(info.shape)) != length:
            raise UnsupportedModelError(f"{name}: shape {info.shape}, wanted ({length},)")
        self._taken.add(name)
        values = self._file.decode(name).reshape(-1)
        if not np.isfinite(values).all():
            wrong = int(np.flatnonzero(~np.isfinite(values))[0])
            raise non_finite_error(name, f"element {wrong}")
        return values

    def required(self, name: str, length: int) -> Vector:
        found = self.vector(name, length)
        if found is None:
            raise UnsupportedModelError(
                f"{name} is missing: architecture {self._config.architecture} needs it"
            )
        return found

    def refuse_leftovers(self) -> None:
        """Raise an error for unused tensors: ignoring one would give wrong results."""
        left = [name for name in self._file.tensors if name not in self._taken]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise UnsupportedModelError(
                f"architecture {self._config.architecture} has no use for {', '.join(left[:3])}{more}; "
                "llama.cpp may: add --engine llama.cpp"
            )

    def attention(self, layer: int) -> AttentionWeights:
        config, prefix = self._config, f"blk.{layer}"
        shape = config.shapes[layer]
        q_rows, kv_rows = shape.heads * config.head_dim, shape.kv_heads * config.head_dim
        q, k, v = self._projections(prefix, (q_rows, kv_rows, kv_rows))
        q_bias, k_bias, v_bias = self._biases(prefix, (q_rows, kv_rows, kv_rows))
        facts = config.facts
        q_norm = k_norm = None
        if facts.qk_norm != "none":
            by_row = facts.qk_norm == "row"
            q_norm = self.required(f"{prefix}.attn_q_norm.weight", q_rows if by_row else config.head_dim)
            k_norm = self.required(f"{prefix}.attn_k_norm.weight", kv_rows if by_row else config.head_dim)
        norm, post_norm = self._norms(facts.pre_norm, f"{prefix}.attn_norm", f"{prefix}.post_attention_norm")
        return AttentionWeights(
            attn_q=q,
            attn_k=k,
            attn_v=v,
            attn_output=self.matrix(f"{prefix}.attn_output", config.width, q_rows),
            attn_norm=norm,
            attn_norm_bias=self.vector(f"{prefix}.attn_norm.bias", config.width),
            attn_q_bias=q_bias,
            attn_k_bias=k_bias,
            attn_v_bias=v_bias,
            attn_output_bias=self.vector(f"{prefix}.attn_output.bias", config.width),
            attn_q_norm=q_norm,
            attn_k_norm=k_norm,
            attn_post_norm=post_norm,
            attn_sinks=self.required(f"{prefix}.attn_sinks.weight", shape.heads) if facts.sinks else None,
        )

    def _norms(self, pre_norm: bool, before: str, after: str) -> tuple[Vector | None, Vector | None]:
        width = self._config.width
        return (
            self.required(f"{before}.weight", width) if pre_norm else None,
            self.required(f"{after}.weight", width) if self._config.facts.post_norm else None,
        )

    def _projections(self, prefix: str, rows: Sequence[int]) -> list[Matrix]:
        """Query, key and value: three tensors, or row ranges of one."""
        width = self._config.width
        fused = self.matrix_or_none(f"{prefix}.attn_qkv", sum(rows), width)
        if fused is None:
            return [
                self.matrix(f"{prefix}.attn_{part}", count, width)
                for part, count in zip("qkv", rows, strict=True)
            ]
        ends = np.cumsum(rows).tolist()
        return [fused.take_rows(end - count, end) for end, count in zip(ends, rows, strict=True)]

    def _biases(self, prefix: str, rows: Sequence[int]) -> list[Vector | None]:
        fused = self.vector(f"{prefix}.attn_qkv.bias", sum(rows))
        if fused is not None:
            return list(np.split(fused, np.cumsum(rows)[:-1]))
        return [
            self.vector(f"{prefix}.attn_{part}.bias", count) for part, count in zip("qkv", rows, strict=True)
        ]

    def feed_forward(self, layer: int) -> FeedForwardWeights | ExpertWeights:
        experts = self._config.experts_of(layer)
        return self._dense(layer) if experts is None else self._mixture(layer, experts)

    def _mixture(self, layer: int, experts: ExpertsConfig) -> ExpertWeights:
        config, prefix = self._config, f"blk.{layer}"
        count, hidden, width = experts.count, experts.feed_forward, config.width
        return ExpertWeights(
            ffn_gate_inp=self.matrix(f"{prefix}.ffn_gate_inp", count, width),
            ffn_up_exps=self.experts(f"{prefix}.ffn_up_exps", count, hidden, width),
            ffn_down_exps=self.experts(f"{prefix}.ffn_down_exps", count, width, hidden),
            ffn_gate_exps=self.experts(f"{prefix}.ffn_gate_exps", count, hidden, width),
            ffn_norm=self.required(f"{prefix}.{config.facts.feed_forward_norm}.weight", width),
            ffn_gate_inp_bias=self.vector(f"{prefix}.ffn_gate_inp.bias", count),
            ffn_up_exps_bias=self.vector(f"{prefix}.ffn_up_exps.bias", count * hidden),
            ffn_down_exps_bias=self.vector(f"{prefix}.ffn_down_exps.bias", count * width),
            ffn_gate_exps_bias=self.vector(f"{prefix}.ffn_gate_exps.bias", count * hidden),
            shared=self._shared(prefix, experts.shared) if experts.shared else None,
            ffn_gate_inp_shexp=self.required(f"{prefix}.ffn_gate_inp_shexp.weight", width)
            if config.facts.shared_expert == "gated"
            else None,
        )

    def _shared(self, prefix: str, hidden: int) -> FeedForwardWeights:
        """The shared expert."""
        width = self._config.width
        return FeedForwardWeights(
            ffn_up=self.matrix(f"{prefix}.ffn_up_shexp", hidden, width),
            ffn_down=self.matrix(f"{prefix}.ffn_down_shexp", width, hidden),
            ffn_gate=self.matrix(f"{prefix}.ffn_gate_shexp", hidden, width),
        )

    def _dense(self, layer: int) -> FeedForwardWeights:
        config, prefix = self._config, f"blk.{layer}"
        width, hidden = config.width, config.shapes[layer].feed_forward
        gate = None
        fused = self._file.tensors.get(f"{prefix}.ffn_up.weight")
        if config.facts.gated and fused is not None and fused.shape == (2 * hidden, width):
            both = self.matrix(f"{prefix}.ffn_up", 2 * hidden, width)
            gate, up = both.take_rows(0, hidden), both.take_rows(hidden, 2 * hidden)
        else:
            up = self.matrix(f"{prefix}.ffn_up", hidden, width)
            if config.facts.gated:
                gate = self.matrix(f"{prefix}.ffn_gate", hidden, width)
        norm, post_norm = self._norms(config.facts.pre_norm, f"{prefix}.ffn_norm", f"{prefix}.post_ffw_norm")
        return FeedForwardWeights(
            ffn_up=up,
            ffn_down=self.matrix(f"{prefix}.ffn_down", width, hidden),
            ffn_gate=gate,
            ffn_norm=norm,
            ffn_norm_bias=self.vector(f"{prefix}.ffn_norm.bias", width),
            ffn_gate_bias=self.vector(f"{prefix}.ffn_gate.bias", hidden),
            ffn_up_bias=self.vector(f"{prefix}.ffn_up.bias", hidden),
            ffn_down_bias=self.vector(f"{prefix}.ffn_down.bias", width),
            ffn_post_norm=post_norm,
        )


def embedding_rows(file: GGUFFile) -> int:
    """The vocabulary size, from the embedding's shape.

    Raises:
        UnsupportedModelError: the file has no embedding.
    """
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        found = "is missing" if info is None else f"has shape {info.shape}"
        raise UnsupportedModelError(
            f"{file.path.name}: token_embd.weight {found}; this file holds no language model"
        )
    return info.shape[0]


def read_weights(file: GGUFFile, config: ModelConfig) -> DecoderWeights:
    """All of a decoder's weights, matrices as views of the memory map.

    Raises:
        UnsupportedModelError: a missing, misshapen or unexpected tensor.
    """
    reader = WeightReader(file, config)
    embedding = reader.matrix("token_embd", config.vocabulary_size, config.width)
    weights = DecoderWeights(
        token_embd=embedding,
        output=reader.matrix_or_none("output", config.vocabulary_size, config.width) or embedding,
        output_norm=reader.required("output_norm.weight", config.width),
        output_norm_bias=reader.vector("output_norm.bias", config.width),
        layers=tuple(
            LayerWeights(reader.attention(i), reader.feed_forward(i)) for i in range(len(config.shapes))
        ),
    )
    reader.refuse_leftovers()
    return weights
