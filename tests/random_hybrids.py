"""Metadata and tensors of the recurrent layers of random model files, by architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgeinfer.model_config.architectures import ARCHITECTURES

Shapes = Mapping[str, tuple[int, ...]]


class Model(Protocol):
    """The sizes of a random model."""

    @property
    def architecture(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def expert_length(self) -> int: ...
    @property
    def shared_length(self) -> int: ...


@dataclass(frozen=True)
class Hybrid:
    """What differs from a model of attention layers: further metadata, and the tensors of a layer, given
    those of an attention layer.
    """

    metadata: Callable[[Model], Mapping[str, Any]]
    layer: Callable[[Model, int, Shapes], Shapes]
    is_recurrent: bool = True
    """Whether some layers keep a recurrent state."""
    outside: Callable[[Model], Shapes] = lambda model: {}
    """Further tensors outside the layers."""


def delta_net(
    key_heads: int,
    value_heads: int,
    head_dim: int,
    interval: int = 2,
    rope_dim: int = 0,
    layout: str = "qwen35",
) -> Hybrid:
    """Layers with a gated delta net, but for every `interval`-th, whose attention is gated. `layout`: qwen35,
    qwen3next, or legacy for its older projections.
    """
    keys, values = key_heads * head_dim, value_heads * head_dim
    channels, taps = 2 * keys + values, 4

    def metadata(model: Model) -> Mapping[str, Any]:
        half = rope_dim // 2 or model.head_dim // 2
        return {
            "full_attention_interval": interval,
            "ssm.conv_kernel": taps,
            "ssm.state_size": head_dim,
            "ssm.group_count": key_heads,
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": values,
            "rope.dimension_sections": [-(-(half - part) // 3) for part in range(3)] + [0],
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        tensors, width = dict(shapes), model.width
        if (index + 1) % interval == 0:
            tensors["attn_q.weight"] = (2 * model.heads * model.head_dim, width)
            return tensors
        shared = ("attn_norm", "post_attention_norm", "ffn")
        tensors = {name: shape for name, shape in tensors.items() if name.startswith(shared)}
        tensors |= {
            "ssm_conv1d.weight": (channels, taps),
            "ssm_a": (value_heads,),
            "ssm_dt.bias": (value_heads,),
            "ssm_norm.weight": (head_dim,),
            "ssm_out.weight": (width, values),
        }
        if layout == "legacy":
            tensors["ssm_in.weight"] = (channels + values, width)
        else:
            tensors |= {"attn_qkv.weight": (channels, width), "attn_gate.weight": (values, width)}
        if layout == "qwen35":
            return {
                **tensors,
                "ssm_beta.weight": (value_heads, width),
                "ssm_alpha.weight": (value_heads, width),
            }
        return {**tensors, "ssm_ba.weight": (2 * value_heads, width)}

    return Hybrid(metadata, layer)


def is_single(model: Model) -> bool:
    """Whether a layer is a single block."""
    return ARCHITECTURES[model.architecture].single_blocks


def selective_scan(
    kinds: str, state_size: int, rank: int, normed: bool = False, routed: tuple[int, ...] = ()
) -> Hybrid:
    """One letter for each layer: m Mamba-1, a attention. Layers of mamba are this block only; those of jamba
    have a feed-forward too, those in `routed` experts. `normed`: dt, B and C have norms.
    """
    taps = 4

    def metadata(model: Model) -> Mapping[str, Any]:
        kv_heads = [model.kv_heads if kind == "a" else 0 for kind in kinds]
        single = {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "rope.dimension_count": 2,
            "ssm.dt_b_c_rms": normed,
        }
        return {
            "attention.head_count_kv": np.array(kv_heads, np.int32),
            **(single if is_single(model) else {}),
            "ssm.conv_kernel": taps,
            "ssm.state_size": state_size,
            "ssm.inner_size": 2 * model.width,
            "ssm.time_step_rank": rank,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        width, inner = model.width, 2 * model.width
        attention = {name: shape for name, shape in shapes.items() if name.startswith("attn")}
        norms = {"ssm_dt_norm.weight": (rank,)}
        norms |= {f"ssm_{name}_norm.weight": (state_size,) for name in "bc"}
        mamba = {
            "attn_norm.weight": (width,),
            "ssm_in.weight": (2 * inner, width),
            "ssm_conv1d.weight": (inner, taps),
            "ssm_conv1d.bias": (inner,),
            "ssm_x.weight": (rank + 2 * state_size, inner),
            "ssm_dt.weight": (inner, rank),
            "ssm_dt.bias": (inner,),
            "ssm_a": (inner, state_size),
            "ssm_d": (inner,),
            "ssm_out.weight": (width, inner),
        }
        if is_single(model):
            return mamba
        feed_forward = {name: shape for name, shape in shapes.items() if name.startswith("ffn")}
        if index not in routed:
            hidden = model.feed_forward
            feed_forward = {
                "ffn_norm.weight": (width,),
                "ffn_gate.weight": (hidden, width),
                "ffn_up.weight": (hidden, width),
                "ffn_down.weight": (width, hidden),
            }
        return {**({**mamba, **norms} if kinds[index] == "m" else attention), **feed_forward}

    return Hybrid(metadata, layer)


def mamba_layers(
    kinds: str, heads: int, head_dim: int, state_size: int, groups: int = 1, normed: bool = True
) -> Hybrid:
    """One letter for each layer: m Mamba-2, a attention, p both in parallel, f feed-forward, h both of
    a draft head. Layers of mamba2 and nemotron_h are this block only; those of granitehybrid and falcon-h1
    have a feed-forward too. `heads`: for a width of 64. `normed`: the results of the heads have a norm.
    """
    taps = 4

    def metadata(model: Model) -> Mapping[str, Any]:
        count = heads * model.width // 64
        kv_heads = [model.kv_heads if kind in "aph" else 0 for kind in kinds]
        lengths = [model.feed_forward if kind in "fh" else 0 for kind in kinds]
        single = {"feed_forward_length": np.array(lengths, np.int32)} if is_single(model) else {}
        return {
            "attention.head_count_kv": np.array(kv_heads, np.int32),
            **single,
            "attention.layer_norm_epsilon": 1e-5,
            "ssm.conv_kernel": taps,
            "ssm.state_size": state_size,
            "ssm.group_count": groups,
            "ssm.time_step_rank": count,
            "ssm.inner_size": count * head_dim,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        kind, width, count = kinds[index], model.width, heads * model.width // 64
        inner = count * head_dim
        channels = inner + 2 * groups * state_size
        skipped = "ffn_norm" if is_single(model) else "-"
        norm = {"attn_norm.weight": (width,)}
        feed_forward = {
            name: shape
            for name, shape in shapes.items()
            if name.startswith(("ffn", "exp_probs")) and not name.startswith(skipped)
        }
        attention = {name: shape for name, shape in shapes.items() if name.startswith("attn")}
        if kind == "p":  # The files of Falcon-H1 have a norm without `.weight` in its name.
            feed_forward = {("ffn_norm" if "norm" in key else key): feed_forward[key] for key in feed_forward}
        mamba = {
            "ssm_in.weight": (inner + channels + count, width),
            "ssm_conv1d.weight": (channels, taps),
            "ssm_conv1d.bias": (channels,),
            "ssm_dt.bias": (count,),
            "ssm_a": (count, 1),
            "ssm_d": (count, 1),
            **({"ssm_norm.weight": (groups, inner // groups)} if normed else {}),
            "ssm_out.weight": (width, inner),
        }
        both = {**mamba, **attention}
        head = {**attention, **feed_forward, "post_attention_norm.weight": (width,)}
        block: Shapes = {"m": mamba, "a": attention, "p": both, "f": feed_forward, "h": head}[kind]
        return {**norm, **block, **({} if is_single(model) else feed_forward)}

    return Hybrid(metadata, layer)


def rwkv7(head_dim: int, ranks: tuple[int, int, int, int]) -> Hybrid:
    """RWKV-7: layers of time mixing and channel mixing. `ranks`: of the matrices of w, a, v and g."""
    decay, rate, value, gate = ranks

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "rope.dimension_count": 2,
            "wkv.head_size": head_dim,
            "attention.decay_lora_rank": decay,
            "attention.iclr_lora_rank": rate,
            "attention.value_residual_mix_lora_rank": value,
            "attention.gate_lora_rank": gate,
            "token_shift_count": 2,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        width, hidden = model.width, model.feed_forward
        own = {"w": decay, "a": rate, "v": value if index else rate, "g": gate}
        norms = ("attn_norm.weight", "attn_norm.bias", "attn_norm_2.weight", "attn_norm_2.bias")
        found: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (width,))
        for name, rank in own.items():
            found[f"time_mix_{name}1.weight"] = (rank, width)
            found[f"time_mix_{name}2.weight"] = (width, rank)
        vectors = ("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln")
        found |= {f"time_mix_{name}.weight": (width,) for name in vectors}
        squares = ("receptance", "key", "value", "output")
        found |= {f"time_mix_{name}.weight": (width, width) for name in squares}
        return {
            **found,
            "time_mix_ln.bias": (width,),
            "time_mix_lerp_fused.weight": (6, 1, 1, width),
            "channel_mix_lerp_k.weight": (1, 1, width),
            "channel_mix_key.weight": (hidden, width),
            "channel_mix_value.weight": (width, hidden),
        }

    return Hybrid(metadata, layer)


def interleaved_experts(step: int) -> Hybrid:
    """Every `step`-th layer has experts, the others a dense feed-forward."""

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        return shapes if (index + 1) % step == 0 else with_dense(model, shapes)

    return Hybrid(lambda model: {"interleave_moe_layer_step": step}, layer, is_recurrent=False)


def with_dense(model: Model, shapes: Shapes) -> Shapes:
    """The tensors of a layer with a dense feed-forward instead of its experts."""
    others = {
        name: shape
        for name, shape in shapes.items()
        if not (name.startswith("exp_probs") or "exps." in name or "shexp" in name or "gate_inp" in name)
    }
    width, hidden = model.width, model.feed_forward
    dense = {"ffn_gate": (hidden, width), "ffn_up": (hidden, width), "ffn_down": (width, hidden)}
    return {**others, **{f"{name}.weight": shape for name, shape in dense.items()}}


def patterned_heads(pattern: str, *, head_gate: bool = True, routed_from: int = 1) -> Hybrid:
    """Layers by letter: w with a window and twice the heads, g without one. `head_gate`: with a gate for each
    head, else for each element. The first layers, up to `routed_from`, are dense.
    """

    def heads_of(model: Model, index: int) -> int:
        return model.heads * (2 if pattern[index] == "w" else 1)

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count": np.array([heads_of(model, i) for i in range(len(pattern))], np.int32),
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": np.array([letter == "w" for letter in pattern]),
            "leading_dense_block_count": routed_from,
            "rope.freq_base_swa": 5000.0,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        heads, width = heads_of(model, index), model.width
        rows = heads * model.head_dim
        found = shapes if index >= routed_from else with_dense(model, shapes)
        return {
            **found,
            "attn_q.weight": (rows, width),
            "attn_output.weight": (width, rows),
            "attn_gate.weight": (heads if head_gate else rows, width),
        }

    return Hybrid(metadata, layer, is_recurrent=False)


def short_values(
    pattern: str, value_dim: int, *, fused: bool = False, dense_from: int | None = None
) -> Hybrid:
    """Layers by letter: w with a window, sinks and twice the KV heads, g without. Values are shorter than
    keys; `fused`: queries, keys and values are one tensor. The first layer is dense, and all from
    `dense_from` on.
    """

    def kv_heads_of(model: Model, index: int) -> int:
        return model.kv_heads * (2 if pattern[index] == "w" else 1)

    def metadata(model: Model) -> Mapping[str, Any]:
        return {
            "attention.head_count_kv": np.array(
                [kv_heads_of(model, i) for i in range(len(pattern))], np.int32
            ),
            "attention.value_length": value_dim,
            "attention.value_scale": 0.7,
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": np.array([letter == "w" for letter in pattern]),
            "rope.freq_base_swa": 5000.0,
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        width, kv_heads = model.width, kv_heads_of(model, index)
        rows = {"q": model.heads * model.head_dim, "k": kv_heads * model.head_dim, "v": kv_heads * value_dim}
        parts = {f"attn_{part}.weight": (count, width) for part, count in rows.items()}
        is_dense = index == 0 or (dense_from is not None and index >= dense_from)
        found = dict(with_dense(model, shapes)) if is_dense else dict(shapes)
        found = {name: shape for name, shape in found.items() if name not in parts}
        if pattern[index] == "g":
            del found["attn_sinks.weight"]
        found["attn_output.weight"] = (width, model.heads * value_dim)
        return {**found, **({"attn_qkv.weight": (sum(rows.values()), width)} if fused else parts)}

    return Hybrid(metadata, layer, is_recurrent=False)
