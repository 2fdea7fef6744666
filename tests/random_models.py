"""Small GGUF files of any architecture with seeded random weights, written by the tests that need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.benchmarking.random_blocks import RandomBlocks
from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer_quant_formats import GGUFWriter, block_format
from edgeinfer_quant_formats.codecs import ENCODERS
from tests.random_hybrids import Hybrid
from tests.zoo.written_once import written_once

VOCABULARY = 288
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


SCALE_BYTES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1 / 50),),
    "Q4_K": ((0, 1 / 150), (2, 1 / 20)),
    "Q6_K": ((208, 1 / 1200),),
}
"""Offsets of a block's float16 scales, and values with which a row of weights has about unit length."""


UNQUANTIZED = (
    *("ffn_gate_inp", "conv.weight", "conv1d", "lerp", "token_types", "position_embd"),
    *("altup", "laurel"),
)
"""Parts of names of matrices that stay F32."""
WITHOUT_NORM_BIASES = ("command-r", "cohere2", "olmo")


@dataclass(frozen=True)
class RandomModel:
    """One file's architecture, sizes and formats. `extra` metadata keys lack the architecture's prefix."""

    architecture: str
    width: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    feed_forward: int = 96
    context: int = 256
    tied: bool = False
    fused: bool = False
    fused_gate: bool = False
    """Gate and up of feed-forwards are one tensor, `ffn_up`."""
    fused_qkv: bool = False
    """Queries, keys and values are one tensor; `fused`: gate and up of feed-forwards too."""
    fused_experts: bool = False
    positions: bool = False
    """Embeddings get learned rows of positions, if these are optional."""
    own_norms: bool = False
    """The norm of attention isn't that of the feed-forward in parallel with it, if that is optional."""
    scales: bool = False
    """Matrices have scales, if these are optional."""
    head_bias: bool = False
    """The head has a bias."""
    norm_biases: bool = False
    """Norms have biases, also those without a mean."""
    draft_head: bool = False
    """An MTP layer follows the last one."""
    experts: int = 0
    experts_per_token: int = 0
    expert_length: int = 0
    """Elements of an expert's hidden row; 0: as `feed_forward`."""
    shared_length: int = 0
    latent_size: int = 0
    """Elements of the latent projection that experts read; 0: they read the hidden states."""
    dense_layers: int = 0
    convolutions: tuple[int, ...] = ()
    """Layers with a short convolution, of `taps` taps."""
    taps: int = 3
    hybrid: Hybrid | None = None
    """The recurrent layers of other kinds."""
    biases: tuple[str, ...] = ()
    qk_norm: bool = True
    """Whether there are norms of queries and keys, if they are optional."""
    gate_tensors: bool = False
    """The gates of attention have a tensor, instead of rows of that of queries."""
    rope_tensors: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    post_norms: float = 1.0
    """Mean weight of the norms after blocks; less for a model of many layers, which multiply errors."""
    formats: tuple[str, ...] = ("F32",)
    """Formats of the matrices, taken in turn."""
    seed: int = 0

    def write(self, path: Path) -> Path:
        """Write the file."""
        written_once(self, path, self._write)
        return path

    def _write(self, path: Path) -> None:
        random = np.random.default_rng([self.seed, *self.architecture.encode()])
        formats = _Cycle(self.formats)
        with GGUFWriter(path, self.metadata()) as writer:
            for name, shape in self.tensors().items():
                values = _values(random, name, shape) * (self.post_norms if "post" in name else 1)
                expected = formats.of_queries if self.is_gate(name) else formats.next_for(name, shape)
                if expected in SCALE_BYTES:
                    writer.add_tensor(name, random_blocks(random, expected, shape), expected, shape)
                elif block_format(expected).grid or (
                    block_format(expected).is_quantized and expected not in ENCODERS
                ):
                    blocks = RandomBlocks(expected, float(values.std()), random)
                    count = values.size // block_format(expected).block_elements
                    writer.add_tensor(name, blocks.take(count).reshape(-1), expected, shape)
                else:
                    writer.add_tensor(name, values, expected)
            for name, factors in self.rope_tensors.items():
                writer.add_tensor(name, factors, "F32")

    def is_gate(self, name: str) -> bool:
        """Whether a tensor takes the format of the queries."""
        return self.gate_tensors and name.endswith("attn_gate.weight")

    def metadata(self) -> dict[str, Any]:
        """The file's keys, a SentencePiece vocabulary of bytes and letters among them."""
        spec = ARCHITECTURES.get(self.architecture)
        layer_norm = spec is not None and spec.norm == "layer"
        epsilon = "layer_norm_epsilon" if layer_norm else "layer_norm_rms_epsilon"
        own = {
            "block_count": self.layers + self.draft_head,
            "embedding_length": self.width,
            "context_length": self.context,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "feed_forward_length": self.feed_forward * (2 if spec and spec.feed_forward_halved else 1),
            f"attention.{epsilon}": 1e-5,
            **self._expert_metadata(),
            **({"nextn_predict_layers": 1} if self.draft_head else {}),
            **self._convolution_metadata(),
            **(self.hybrid.metadata(self) if self.hybrid else {}),
            **self.extra,
        }
        return {
            "general.architecture": self.architecture,
            **{f"{self.architecture}.{key}": value for key, value in own.items()},
            **vocabulary_metadata(),
        }

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def has_norm_biases(self) -> bool:
        """Whether norms have biases; llama.cpp reads none of those in `WITHOUT_NORM_BIASES`."""
        is_layer_norm = ARCHITECTURES[self.architecture].norm == "layer" or self.norm_biases
        return is_layer_norm and self.architecture not in WITHOUT_NORM_BIASES

    def _convolution_metadata(self) -> dict[str, Any]:
        if not self.convolutions:
            return {}
        heads = [0 if layer in self.convolutions else self.kv_heads for layer in range(self.layers)]
        return {"attention.head_count_kv": np.array(heads, np.int32), "shortconv.l_cache": self.taps}

    def _expert_metadata(self) -> dict[str, int]:
        """The keys of a MoE model that aren't 0."""
        keys = {
            "expert_count": self.experts,
            "expert_used_count": self.experts_per_token,
            "expert_feed_forward_length": self.expert_length,
            "expert_shared_feed_forward_length": self.shared_length,
            "leading_dense_block_count": self.dense_layers,
            "moe_latent_size": self.latent_size,
        }
        return {key: value for key, value in keys.items() if value}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor with random values."""
        spec = ARCHITECTURES[self.architecture]
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (VOCABULARY, self.width),
            **({f"{spec.output_norm}.weight": (self.width,)} if spec.norm_weights else {}),
        }
        if self.has_norm_biases:
            shapes[f"{spec.output_norm}.bias"] = (self.width,)
        if spec.positions == "always" or (spec.positions == "by_tensor" and self.positions):
            shapes["position_embd.weight"] = (self.context, self.width)
        if spec.embedding_norm == "weights":
            shapes |= {f"token_embd_norm.{part}": (self.width,) for part in ("weight", "bias")}
        shapes |= self.hybrid.outside(self) if self.hybrid else {}
        if not self.tied:
            shapes["output.weight"] = (VOCABULARY, self.width)
        if self.head_bias:
            shapes["output.bias"] = (VOCABULARY,)
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self.layer_tensors(layer).items()}
        if self.draft_head:
            last = f"blk.{self.layers}"
            shapes |= {f"{last}.{name}": shape for name, shape in self.layer_tensors(self.layers - 1).items()}
            shapes |= {f"{last}.nextn.{name}.weight": (self.width,) for name in ("enorm", "hnorm")}
            shapes[f"{last}.nextn.shared_head_norm.weight"] = (self.width,)
            shapes[f"{last}.nextn.eh_proj.weight"] = (self.width, 2 * self.width)
        return shapes

    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        """The MoE tensors instead of those of a feed-forward."""
        spec, count, width = ARCHITECTURES[self.architecture], self.experts, self.width
        hidden, shared = self.expert_length or self.feed_forward, self.shared_length
        read = self.latent_size or width
        rows = {"ffn_gate": hidden, "ffn_down": read, "ffn_up": hidden}
        columns = {"ffn_gate": read, "ffn_down": hidden, "ffn_up": read}
        shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (count, width)}
        shapes |= {f"{name}_exps.weight": (count, rows[name], columns[name]) for name in rows}
        if self.fused_experts:
            del shapes["ffn_gate_exps.weight"], shapes["ffn_up_exps.weight"]
            shapes["ffn_gate_up_exps.weight"] = (count, 2 * hidden, width)
        if self.latent_size:
            shapes |= {"ffn_latent_down.weight": (read, width), "ffn_latent_up.weight": (width, read)}
        if shared:
            sizes = {"ffn_gate": (shared, width), "ffn_down": (width, shared), "ffn_up": (shared, width)}
            shapes |= {f"{name}_shexp.weight": size for name, size in sizes.items()}
        if not spec.gated:
            shapes = {name: shape for name, shape in shapes.items() if "gate_exps" not in name}
            shapes.pop("ffn_gate_shexp.weight", None)
        is_sigmoid = self.extra.get("expert_gating_func", 2) == 2
        if spec.expert_selection_bias == "always" or (spec.expert_selection_bias != "never" and is_sigmoid):
            shapes["exp_probs_b.bias"] = (count,)
        if spec.shared_expert == "gated":
            shapes["ffn_gate_inp_shexp.weight"] = (width,)
        if "ffn_gate_inp" in self.biases:
            shapes["ffn_gate_inp.bias"] = (count,)
            shapes |= {f"{name}_exps.bias": (count, rows[name]) for name in rows}
        return shapes

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        spec = ARCHITECTURES[self.architecture]
        q, kv, width, hidden = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.width,
            self.feed_forward,
        )
        rows = {
            "attn_q": q,
            "attn_k": kv,
            "attn_v": kv,
            "attn_output": width,
            "ffn_down": width,
            "ffn_up": hidden,
        }
        columns = {"attn_output": q, "ffn_down": hidden}
        if spec.gated:
            rows["ffn_gate"] = hidden
        if self.fused or self.fused_qkv:
            rows["attn_qkv"] = rows.pop("attn_q") + rows.pop("attn_k") + rows.pop("attn_v")
        if self.fused or self.fused_gate:
            rows["ffn_up"] += rows.pop("ffn_gate")
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (count, columns.get(name, width)) for name, count in rows.items()
        }
        if self.experts and layer >= self.dense_layers:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("ffn")}
            shapes |= self._expert_tensors()
            rows = {name: count for name, count in rows.items() if not name.startswith("ffn")}
        shapes |= {f"{name}.bias": (rows[name],) for name in self.biases if name in rows}
        if self.gate_tensors:
            shapes["attn_gate.weight"] = (q, width)
        if spec.sinks:
            shapes["attn_sinks.weight"] = (self.heads,)
        norms = []
        if spec.pre_norm and spec.norm_weights:
            norms += ["attn_norm"] if spec.parallel_feed_forward else ["attn_norm", spec.feed_forward_norm]
            norms += ["attn_norm_2"] if self.own_norms else []
        if spec.sub_norms:
            shapes |= {"attn_sub_norm.weight": (q,), "ffn_sub_norm.weight": (hidden,)}
        if self.scales:
            shapes |= {f"{name}.scale": (1,) for name in rows}
        if spec.post_norm:
            norms += ["post_attention_norm", "post_ffw_norm"]
        shapes |= {f"{name}.weight": (width,) for name in norms}
        if self.has_norm_biases:
            shapes |= {f"{name}.bias": (width,) for name in norms}
        if spec.qk_norm != "none" and self.qk_norm:
            by_row = spec.qk_norm == "row"
            shapes["attn_q_norm.weight"] = (q if by_row else self.head_dim,)
            shapes["attn_k_norm.weight"] = (kv if by_row else self.head_dim,)
        if layer in self.convolutions:
            others = {
                name: shape
                for name, shape in shapes.items()
                if name.startswith(("attn_norm", "ffn", "exp_probs"))
            }
            return {
                "shortconv.in_proj.weight": (3 * width, width),
                "shortconv.out_proj.weight": (width, width),
                "shortconv.conv.weight": (width, self.taps),
                **others,
            }
        return dict(self.hybrid.layer(self, layer, shapes)) if self.hybrid else shapes


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = random.standard_normal(shape)
    if name.endswith(("norm.weight", "ffn_norm", "ffw_norm_1.weight", "ffw_norm_2.weight", "scale")):
        values = 1 + 0.1 * values
    elif name.endswith("output_scale.weight"):
        values = 0.8 + 0.1 * values
    elif name.endswith("ssm_a"):
        values = -np.exp(values)
    elif name.endswith("ssm_dt.weight"):
        values = values * 0.3 / np.sqrt(shape[-1])
    elif len(shape) == 1 or name.endswith("bias"):
        values = 0.2 * values
    elif name != "token_embd.weight":
        values = values * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)


def random_blocks(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Random bits with fixed scales: files with stored goldens mustn't change with the encoder."""
    form = block_format(name)
    count = int(np.prod(shape)) // form.block_elements
    blocks = random.integers(0, 256, (count, form.block_bytes), np.uint8)
    for at, scale in SCALE_BYTES[name]:
        blocks[:, at : at + 2] = np.array([scale / np.sqrt(shape[-1])], np.float16).view(np.uint8)
    return blocks


class _Cycle:
    """Gives each matrix the next format that its rows allow; vectors and routers stay F32."""

    def __init__(self, formats: tuple[str, ...]) -> None:
        self._formats = formats
        self._count = 0
        self.of_queries = ""
        """The format of the last `attn_q`."""

    def next_for(self, name: str, shape: tuple[int, ...]) -> str:
        is_vector = len(shape) == 1 or name.endswith(("bias", "ssm_a", "ssm_d", "ssm_norm.weight"))
        if is_vector or any(part in name for part in UNQUANTIZED):
            return "F32"
        self._count += 1
        expected = self._formats[self._count % len(self._formats)]
        expected = expected if shape[-1] % block_format(expected).block_elements == 0 else "F32"
        self.of_queries = expected if name.endswith("attn_q.weight") else self.of_queries
        return expected


def vocabulary_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary of 288: three specials, 256 bytes, letters and a few words."""
    letters = [
        "▁",
        *"etaoinshrdlu",
        "▁t",
        "he",
        "▁the",
        "an",
        "▁a",
        "in",
        "er",
        "▁w",
        "re",
        "on",
        "▁s",
        "▁o",
        "▁b",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [f"<|extra{i}|>" for i in range(VOCABULARY - len(tokens))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(letters)
    types += [3] * (VOCABULARY - len(types))
    scores = [0.0] * 259 + [-float(i) for i in range(VOCABULARY - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
