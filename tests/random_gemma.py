"""Metadata and tensors of the layers of Gemma 3n and Gemma 4 in random model files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.random_hybrids import Hybrid, Model, Shapes

STREAMS, PER_LAYER, LAUREL_RANK = 4, 256, 64
"""Sizes of Gemma 3n that llama.cpp doesn't read from the file."""


OWN_CACHES, SPARSE_LAYERS = 20, 10


def gemma3n_layers(
    has_keys: bool = True, own_caches: int = OWN_CACHES, sparse: int = SPARSE_LAYERS, pattern: int = 5
) -> Hybrid:
    """Layers of Gemma 3n, of which every fifth (`pattern`) and the last have no window. `has_keys`: with the
    keys of published files. `own_caches`, `sparse`: first layers with a cache, and with few active neurons.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        windows = [(layer + 1) % pattern != 0 and layer + 1 != model.layers for layer in range(model.layers)]
        shares = [1.6448533535003662] * sparse + [-np.inf] * (model.layers - sparse)
        keys = {
            "altup.active_idx": 0,
            "altup.num_inputs": STREAMS,
            "embedding_length_per_layer_input": PER_LAYER,
            "activation_sparsity_scale": np.array(shares, np.float32),
            "attention.shared_kv_layers": model.layers - own_caches,
            "attention.sliding_window_pattern": np.array(windows),
            "final_logit_softcapping": 30.0,
        }
        return {"attention.sliding_window": 6, "rope.freq_base": 1e6, **(keys if has_keys else {})}

    def outside(model: Model) -> Shapes:
        columns, width = model.layers * PER_LAYER, model.width
        return {
            "per_layer_token_embd.weight": (model.vocabulary, columns),
            "per_layer_model_proj.weight": (columns, width),
            "per_layer_proj_norm.weight": (PER_LAYER,),
            "altup_proj.weight": (STREAMS - 1, width, width),
            "altup_unembd_proj.weight": (STREAMS - 1, width, width),
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        width = model.width
        return {
            **shapes,
            "inp_gate.weight": (PER_LAYER, width),
            "proj.weight": (width, PER_LAYER),
            "post_norm.weight": (width,),
            "altup_correct_coef.weight": (STREAMS, STREAMS),
            "altup_correct_scale.weight": (width,),
            "altup_predict_coef.weight": (STREAMS**2, STREAMS),
            "altup_router.weight": (STREAMS, width),
            "altup_router_norm.weight": (width,),
            "laurel_l.weight": (LAUREL_RANK, width),
            "laurel_r.weight": (width, LAUREL_RANK),
            "laurel_post_norm.weight": (width,),
        }

    return Hybrid(metadata, layer, is_recurrent=False, outside=outside)


def gemma4_parts(pattern: str, **layers: Any) -> dict[str, Any]:
    """The layers of a Gemma 4 model, and its RoPE factors, which only layers without a window read."""
    factors = {"rope_freqs.weight": np.linspace(1.0, 1e30, 16, dtype=np.float32)}
    return {"hybrid": gemma4_layers(pattern, **layers), "rope_tensors": factors}


def gemma4_layers(
    pattern: str, shared_kv: int = 0, per_layer: bool = False, routed: bool = False, scaled: bool = True
) -> Hybrid:
    """Layers by letter: w with a window and heads of half the size, g without one. `shared_kv`: last layers
    without keys and values. `per_layer`: with per-layer embeddings of half the width. `routed`: with experts
    besides the dense feed-forward. `scaled`: with layer scales.
    """

    def metadata(model: Model) -> Mapping[str, Any]:
        kv_heads = [model.kv_heads if letter == "w" else model.kv_heads // 2 for letter in pattern]
        half = model.head_dim // 2
        return {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": np.array([letter == "w" for letter in pattern]),
            "attention.head_count_kv": np.array(kv_heads, np.int32),
            "attention.key_length_swa": half,
            "attention.value_length_swa": half,
            "rope.dimension_count_swa": half,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "attention.shared_kv_layers": shared_kv,
            "embedding_length_per_layer_input": model.width // 2 if per_layer else 0,
            "final_logit_softcapping": 10.0,
        }

    def outside(model: Model) -> Shapes:
        width, columns = model.width // 2, model.layers * (model.width // 2)
        if not per_layer:
            return {}
        return {
            "per_layer_token_embd.weight": (model.vocabulary, columns),
            "per_layer_model_proj.weight": (columns, model.width),
            "per_layer_proj_norm.weight": (width,),
        }

    def layer(model: Model, index: int, shapes: Shapes) -> Shapes:
        found = {name: shape for name, shape in shapes.items() if not name.startswith("attn_")}
        found |= _attention(model, pattern[index], has_keys=index < model.layers - shared_kv)
        if routed:
            found |= _dense(model, found["ffn_gate_inp.weight"][0])
        if per_layer:
            half = model.width // 2
            found |= {"inp_gate.weight": (half, model.width), "proj.weight": (model.width, half)}
            found["post_norm.weight"] = (model.width,)
        return {**found, "layer_output_scale.weight": (1,)} if scaled else found

    return Hybrid(metadata, layer, is_recurrent=False, outside=outside)


def _attention(model: Model, letter: str, *, has_keys: bool) -> Shapes:
    width = model.width
    is_windowed = letter == "w"
    head_dim = model.head_dim // 2 if is_windowed else model.head_dim
    rows, kv_heads = model.heads * head_dim, model.kv_heads if is_windowed else model.kv_heads // 2
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (rows, width),
        "attn_q_norm.weight": (head_dim,),
        "attn_output.weight": (width, rows),
    }
    if has_keys:
        shapes |= {"attn_k.weight": (kv_heads * head_dim, width), "attn_k_norm.weight": (head_dim,)}
        if is_windowed:
            shapes["attn_v.weight"] = (kv_heads * head_dim, width)
    return shapes


def _dense(model: Model, experts: int) -> Shapes:
    """The tensors of a dense feed-forward besides experts, and of the norms of both."""
    width, hidden = model.width, model.feed_forward
    norms = ("ffn_norm.weight", "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight")
    return {
        **dict.fromkeys(norms, (width,)),
        "ffn_gate.weight": (hidden, width),
        "ffn_up.weight": (hidden, width),
        "ffn_down.weight": (width, hidden),
        "ffn_gate_inp.scale": (width,),
        "ffn_down_exps.scale": (experts,),
    }
