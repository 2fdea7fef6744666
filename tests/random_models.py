"""Small GGUF files of any architecture with seeded random weights, written by the tests that need them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.model_config.architectures import ARCHITECTURES
from edgeinfer_quant_formats import GGUFWriter, block_format
from tests.random_hybrids import Hybrid, delta_net, selective_scan

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
"""Where a block's float16 scales lie, and values that make a row of weights about as long as a normal one."""


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
    fused_experts: bool = False
    draft_head: bool = False
    """An MTP layer follows the last one."""
    experts: int = 0
    experts_used: int = 0
    expert_length: int = 0
    """Elements of an expert's hidden row; 0: as `feed_forward`."""
    shared_length: int = 0
    dense_layers: int = 0
    convolutions: tuple[int, ...] = ()
    """Layers with a short convolution, of `taps` taps."""
    taps: int = 3
    hybrid: Hybrid | None = None
    """The recurrent layers of other kinds."""
    biases: tuple[str, ...] = ()
    rope_tensors: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ("F32",)
    """Formats of the matrices, taken in turn."""
    seed: int = 0

    def write(self, path: Path) -> Path:
        """Write the file."""
        random = np.random.default_rng([self.seed, *self.architecture.encode()])
        formats = _Cycle(self.formats)
        with GGUFWriter(path, self.metadata()) as writer:
            for name, shape in self.tensors().items():
                values = _values(random, name, shape)
                wanted = formats.next_for(name, shape)
                if wanted in SCALE_BYTES:
                    writer.add_tensor(name, _raw_blocks(random, wanted, shape), wanted, shape)
                else:
                    writer.add_tensor(name, values, wanted)
            for name, factors in self.rope_tensors.items():
                writer.add_tensor(name, factors, "F32")
        return path

    def metadata(self) -> dict[str, Any]:
        """The file's keys, a SentencePiece vocabulary of bytes and letters among them."""
        facts = ARCHITECTURES.get(self.architecture)
        layer_norm = facts is not None and facts.norm == "layer"
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
            "feed_forward_length": self.feed_forward,
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

    def _convolution_metadata(self) -> dict[str, Any]:
        if not self.convolutions:
            return {}
        heads = [0 if layer in self.convolutions else self.kv_heads for layer in range(self.layers)]
        return {"attention.head_count_kv": np.array(heads, np.int32), "shortconv.l_cache": self.taps}

    def _expert_metadata(self) -> dict[str, int]:
        """The keys of a mixture that aren't 0."""
        keys = {
            "expert_count": self.experts,
            "expert_used_count": self.experts_used,
            "expert_feed_forward_length": self.expert_length,
            "expert_shared_feed_forward_length": self.shared_length,
            "leading_dense_block_count": self.dense_layers,
        }
        return {key: value for key, value in keys.items() if value}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor with random values."""
        facts = ARCHITECTURES[self.architecture]
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (VOCABULARY, self.width),
            f"{facts.output_norm}.weight": (self.width,),
        }
        if facts.norm == "layer":
            shapes[f"{facts.output_norm}.bias"] = (self.width,)
        if not self.tied:
            shapes["output.weight"] = (VOCABULARY, self.width)
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self._layer_tensors(layer).items()}
        if self.draft_head:
            last = f"blk.{self.layers}"
            shapes |= {
                f"{last}.{name}": shape for name, shape in self._layer_tensors(self.layers - 1).items()
            }
            shapes |= {f"{last}.nextn.{name}.weight": (self.width,) for name in ("enorm", "hnorm")}
            shapes[f"{last}.nextn.shared_head_norm.weight"] = (self.width,)
            shapes[f"{last}.nextn.eh_proj.weight"] = (self.width, 2 * self.width)
        return shapes

    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors that a mixture has in place of a feed-forward."""
        facts, count, width = ARCHITECTURES[self.architecture], self.experts, self.width
        hidden, shared = self.expert_length or self.feed_forward, self.shared_length
        rows = {"ffn_gate": hidden, "ffn_down": width, "ffn_up": hidden}
        columns = {"ffn_gate": width, "ffn_down": hidden, "ffn_up": width}
        shapes: dict[str, tuple[int, ...]] = {"ffn_gate_inp.weight": (count, width)}
        shapes |= {f"{name}_exps.weight": (count, rows[name], columns[name]) for name in rows}
        if self.fused_experts:
            del shapes["ffn_gate_exps.weight"], shapes["ffn_up_exps.weight"]
            shapes["ffn_gate_up_exps.weight"] = (count, 2 * hidden, width)
        if shared:
            sizes = {"ffn_gate": (shared, width), "ffn_down": (width, shared), "ffn_up": (shared, width)}
            shapes |= {f"{name}_shexp.weight": size for name, size in sizes.items()}
        if facts.shared_expert == "gated":
            shapes["ffn_gate_inp_shexp.weight"] = (width,)
        if "ffn_gate_inp" in self.biases:
            shapes["ffn_gate_inp.bias"] = (count,)
            shapes |= {f"{name}_exps.bias": (count, rows[name]) for name in rows}
        return shapes

    def _layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        facts = ARCHITECTURES[self.architecture]
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
        if facts.gated:
            rows["ffn_gate"] = hidden
        if self.fused:
            rows["attn_qkv"] = rows.pop("attn_q") + rows.pop("attn_k") + rows.pop("attn_v")
            rows["ffn_up"] += rows.pop("ffn_gate")
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (count, columns.get(name, width)) for name, count in rows.items()
        }
        if self.experts and layer >= self.dense_layers:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("ffn")}
            shapes |= self._expert_tensors()
            rows = {name: count for name, count in rows.items() if not name.startswith("ffn")}
        shapes |= {f"{name}.bias": (rows[name],) for name in self.biases if name in rows}
        if facts.sinks:
            shapes["attn_sinks.weight"] = (self.heads,)
        norms = []
        if facts.pre_norm:
            norms += ["attn_norm", facts.feed_forward_norm]
        if facts.post_norm:
            norms += ["post_attention_norm", "post_ffw_norm"]
        shapes |= {f"{name}.weight": (width,) for name in norms}
        if facts.norm == "layer":
            shapes |= {f"{name}.bias": (width,) for name in norms}
        if facts.qk_norm != "none":
            by_row = facts.qk_norm == "row"
            shapes["attn_q_norm.weight"] = (q if by_row else self.head_dim,)
            shapes["attn_k_norm.weight"] = (kv if by_row else self.head_dim,)
        if layer in self.convolutions:
            kept = {name: shape for name, shape in shapes.items() if name.startswith(("attn_norm", "ffn"))}
            return {
                "shortconv.in_proj.weight": (3 * width, width),
                "shortconv.out_proj.weight": (width, width),
                "shortconv.conv.weight": (width, self.taps),
                **kept,
            }
        return dict(self.hybrid.layer(self, layer, shapes)) if self.hybrid else shapes


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    values = random.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.1 * values
    elif name.endswith("ssm_a"):
        values = -np.exp(values)
    elif len(shape) == 1 or name.endswith("bias"):
        values = 0.2 * values
    elif name != "token_embd.weight":
        values = values * 1.5 / np.sqrt(shape[-1])
    return values.astype(np.float32)


def _raw_blocks(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Random bits with fixed scales: files whose goldens are kept mustn't change with our encoder."""
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

    def next_for(self, name: str, shape: tuple[int, ...]) -> str:
        is_vector = len(shape) == 1 or name.endswith(("bias", "ssm_a", "ssm_d", "ssm_norm.weight"))
        if is_vector or "ffn_gate_inp" in name or "conv" in name:
            return "F32"
        self._count += 1
        wanted = self._formats[self._count % len(self._formats)]
        return wanted if shape[-1] % block_format(wanted).block_elements == 0 else "F32"


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


_Q5 = ("attn_q", "attn_k", "attn_v", "attn_output")
_ALL_BIASES = (*_Q5, "ffn_up", "ffn_down")


def _long_factors(count: int, most: float) -> npt.NDArray[np.float32]:
    return np.linspace(1.0, most, count, dtype=np.float32)


ZOO: dict[str, RandomModel] = {
    "llama": RandomModel("llama"),
    "llama-tied-biases": RandomModel("llama", tied=True, biases=_Q5),
    "llama-linear": RandomModel(
        "llama", extra={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 20000.0}
    ),
    "llama-yarn": RandomModel(
        "llama",
        extra={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "llama3-factors": RandomModel(
        "llama", extra={"rope.freq_base": 500000.0}, rope_tensors={"rope_freqs.weight": _long_factors(8, 8.0)}
    ),
    "arcee": RandomModel("arcee", tied=True),
    "exaone4": RandomModel("exaone4", tied=True),
    "gemma": RandomModel("gemma", tied=True, head_dim=32),
    "gemma2": RandomModel(
        "gemma2",
        layers=4,
        tied=True,
        head_dim=32,
        extra={
            "attention.sliding_window": 6,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": RandomModel(
        "gemma3",
        layers=7,
        tied=True,
        head_dim=32,
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base": 1000000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "qwen35": RandomModel("qwen35", layers=4, hybrid=delta_net(2, 4, 16)),
    "qwen35-draft-head": RandomModel("qwen35", layers=4, hybrid=delta_net(2, 4, 16), draft_head=True),
    "qwen35-partial-rope": RandomModel(
        "qwen35",
        head_dim=32,
        hybrid=delta_net(3, 3, 32, interval=3, rope_dim=16),
        extra={"rope.dimension_count": 16, "attention.recurrent_layers": [True, True, False]},
    ),
    "qwen35moe": RandomModel(
        "qwen35moe", experts=8, experts_used=3, expert_length=32, shared_length=64, hybrid=delta_net(1, 2, 16)
    ),
    "qwen35moe-fused": RandomModel(
        "qwen35moe",
        experts=8,
        experts_used=3,
        expert_length=32,
        shared_length=64,
        fused_experts=True,
        hybrid=delta_net(1, 2, 16),
    ),
    "qwen3next": RandomModel(
        "qwen3next",
        experts=8,
        experts_used=3,
        expert_length=32,
        shared_length=64,
        hybrid=delta_net(2, 4, 16, layout="qwen3next"),
    ),
    "qwen3next-legacy": RandomModel(
        "qwen3next",
        experts=8,
        experts_used=3,
        expert_length=32,
        shared_length=64,
        hybrid=delta_net(2, 6, 16, layout="legacy"),
    ),
    "lfm2": RandomModel("lfm2", layers=4, convolutions=(1, 2), tied=True),
    "granite": RandomModel(
        "granite",
        extra={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 3.0, "attention.scale": 0.1},
    ),
    "gpt-oss": RandomModel(
        "gpt-oss",
        layers=4,
        head_dim=32,
        experts=6,
        experts_used=3,
        expert_length=96,
        biases=(*_Q5, "ffn_gate_inp"),
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "granitemoe": RandomModel(
        "granitemoe",
        experts=8,
        experts_used=3,
        extra={"logit_scale": 6.0, "residual_scale": 0.22, "embedding_scale": 3.0, "attention.scale": 0.1},
    ),
    "granitemoe-shared": RandomModel(
        "granitemoe", experts=5, experts_used=2, shared_length=64, tied=True, extra={"logit_scale": 2.0}
    ),
    "internlm2": RandomModel("internlm2"),
    "mixtral": RandomModel("llama", experts=4, experts_used=2),
    "olmo2": RandomModel("olmo2", kv_heads=4),
    "olmo2-windows": RandomModel("olmo2", layers=5, extra={"attention.sliding_window": 6}),
    "olmoe": RandomModel("olmoe", kv_heads=4, experts=9, experts_used=4),
    "phi3": RandomModel("phi3", fused=True),
    "phi3-longrope": RandomModel(
        "phi3",
        fused=True,
        extra={
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.19,
        },
        rope_tensors={
            "rope_factors_long.weight": _long_factors(8, 40.0),
            "rope_factors_short.weight": _long_factors(8, 2.0),
        },
    ),
    "qwen2": RandomModel("qwen2", biases=("attn_q", "attn_k", "attn_v")),
    "qwen2moe": RandomModel(
        "qwen2moe",
        biases=("attn_q", "attn_k", "attn_v"),
        experts=7,
        experts_used=3,
        expert_length=32,
        shared_length=128,
    ),
    "qwen3": RandomModel("qwen3", head_dim=32),
    "qwen3moe": RandomModel("qwen3moe", head_dim=32, experts=16, experts_used=5, expert_length=64),
    "seed_oss": RandomModel("seed_oss", biases=("attn_q", "attn_k", "attn_v")),
    "smallthinker": RandomModel(
        "smallthinker",
        layers=5,
        experts=8,
        experts_used=3,
        expert_length=96,
        extra={"expert_gating_func": 2, "attention.sliding_window": 4096},
    ),
    "smallthinker-softmax": RandomModel(
        "smallthinker",
        tied=True,
        experts=8,
        experts_used=2,
        expert_length=64,
        extra={"expert_gating_func": 1},
    ),
    "smollm3": RandomModel("smollm3", layers=5, tied=True),
    "starcoder2": RandomModel("starcoder2", tied=True, biases=_ALL_BIASES),
    "mamba": RandomModel("mamba", hybrid=selective_scan("mmm", 16, 8)),
    "mamba-normed": RandomModel("mamba", tied=True, hybrid=selective_scan("mmm", 24, 20, normed=True)),
    "jamba": RandomModel("jamba", hybrid=selective_scan("mam", 16, 4)),
    "jamba-moe": RandomModel(
        "jamba", layers=4, experts=8, experts_used=2, hybrid=selective_scan("mmam", 16, 32, routed=(1, 3))
    ),
}
"""One file or more for every architecture; their goldens come from llama.cpp."""
