"""Vectors of random encoders equal those of transformers with the same weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer_quant_formats import GGUFFile
from tests.random_encoders import ENCODER_ZOO, RandomEncoder
from tests.random_models import VOCABULARY

MIN_COSINE = 0.9999
TEXTS = ["a fox ran into a wood", "x", "two and two are four, so they say; but nobody cared to count " * 2]
Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]
BERT_NAMES = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
NOMIC_NAMES = {
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_layernorm",
}
MODERN_NAMES = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
GEMMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_up": "mlp.up_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def common(model: RandomEncoder) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.feed_forward,
        "max_position_embeddings": model.context,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }


def in_layers(tensors: Tensors, names: dict[str, str], prefix: str) -> Iterator[tuple[str, Array]]:
    """The tensors of the layers with their names in transformers."""
    for name, values in tensors.items():
        if name.startswith("blk."):
            _, layer, *middle, kind = name.split(".")
            if middle[0] in names:
                yield f"{prefix}.{layer}.{names[middle[0]]}.{kind}", values


def embeddings(tensors: Tensors) -> Tensors:
    """The embeddings and their norm, as BERT and its relatives name them."""
    names = {
        "token_embd.weight": "word",
        "position_embd.weight": "position",
        "token_types.weight": "token_type",
    }
    renamed = {
        f"embeddings.{name}_embeddings.weight": tensors[own] for own, name in names.items() if own in tensors
    }
    for kind in ("weight", "bias"):
        renamed[f"embeddings.LayerNorm.{kind}"] = tensors[f"token_embd_norm.{kind}"]
    return renamed


def bert(transformers: Any, model: RandomEncoder, tensors: Tensors) -> tuple[Any, Tensors]:
    config = transformers.BertConfig(**common(model), layer_norm_eps=1e-5)
    layers = dict(in_layers(tensors, BERT_NAMES, "encoder.layer"))
    return transformers.BertModel(config, add_pooling_layer=False), embeddings(tensors) | layers


def nomic_bert(transformers: Any, model: RandomEncoder, tensors: Tensors) -> tuple[Any, Tensors]:
    rope = {"rope_type": "default", "rope_theta": model.extra["rope.freq_base"]}
    config = transformers.NomicBertConfig(**common(model), layer_norm_eps=1e-5, rope_parameters=rope)
    weights = embeddings(tensors) | dict(in_layers(tensors, NOMIC_NAMES, "layers"))
    for layer in range(model.layers):
        parts = np.split(tensors[f"blk.{layer}.attn_qkv.weight"], 3)
        weights |= {
            f"layers.{layer}.self_attn.{name}_proj.weight": part
            for name, part in zip("qkv", parts, strict=True)
        }
    return transformers.NomicBertModel(config, add_pooling_layer=False), weights


def modern_bert(transformers: Any, model: RandomEncoder, tensors: Tensors) -> tuple[Any, Tensors]:
    config = transformers.ModernBertConfig(
        **common(model), norm_eps=1e-5, norm_bias=False, local_attention=8, global_attn_every_n_layers=3
    )
    weights = dict(in_layers(tensors, MODERN_NAMES, "layers"))
    weights["embeddings.tok_embeddings.weight"] = tensors["token_embd.weight"]
    weights["embeddings.norm.weight"] = tensors["token_embd_norm.weight"]
    weights["final_norm.weight"] = tensors["output_norm.weight"]
    return transformers.ModernBertModel(config), weights


def gemma(transformers: Any, model: RandomEncoder, tensors: Tensors) -> tuple[Any, Tensors]:
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = transformers.Gemma3TextConfig(
        **common(model),
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=1e-5,
        sliding_window=8,
        query_pre_attn_scalar=model.head_dim,
        use_bidirectional_attention=True,
        rope_parameters=ropes,
    )
    weights = dict(in_layers(tensors, GEMMA_NAMES, "layers"))
    weights["norm.weight"] = tensors["output_norm.weight"]
    weights = {name: values - 1 if "norm" in name else values for name, values in weights.items()}
    weights["embed_tokens.weight"] = tensors["token_embd.weight"]
    return transformers.Gemma3TextModel(config), weights


BUILDERS: dict[str, Callable[[Any, RandomEncoder, Tensors], tuple[Any, Tensors]]] = {
    "bert": bert,
    "gemma-embedding": gemma,
    "modern-bert": modern_bert,
    "nomic-bert": nomic_bert,
}


def tensors_of(path: Path) -> Tensors:
    with GGUFFile.open(path) as file:
        return {name: file.decode(name).reshape(info.shape) for name, info in file.tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors_equal_those_of_transformers(tmp_path: Path, name: str, pooling: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    path = ENCODER_ZOO[name].write(tmp_path / "model.gguf")
    module, weights = BUILDERS[name](transformers, ENCODER_ZOO[name], tensors_of(path))
    state = {name: torch.tensor(np.array(values)) for name, values in weights.items()}
    module.load_state_dict(state, strict=True)
    module.eval()
    with edgeinfer.load(path, draft=None) as model, torch.no_grad():
        vectors = model.embed(TEXTS, pooling=pooling)
        for text, vector in zip(TEXTS, vectors, strict=True):
            ids = torch.tensor([model.tokenizer.encode(text, bos=True)])
            rows = module(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].numpy()
            expected = rows[0] if pooling == "cls" else rows.mean(axis=0)
            cosine = float(vector @ expected / np.linalg.norm(expected))
            print(f"{name} {pooling} {len(rows)} tokens: 1 - cosine {1 - cosine:.2e}")
            assert cosine >= MIN_COSINE
