"""Small Hugging Face folders with seeded random weights, made by transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import edgeinfer

Logits = npt.NDArray[np.float32]
VOCABULARY = 288
IDS = np.random.default_rng(0).integers(3, 280, 40).tolist()
TEXTS = ["the quick brown fox jumps over the lazy dog and the other things, 12 of them"] * 3
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_HEAD_DIM = {"head_dim": None}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {**LOCAL, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3Text", {"sliding_window": 8, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "granitemoe": ("GraniteMoe", {**LOCAL, "residual_multiplier": 0.5}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "command-r": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"sliding_window": 8}),
    "ernie4_5": ("Ernie4_5", {}),
    "exaone4": ("Exaone4", {"sliding_window": 8}),
    "glm4": ("Glm4", {}),
    "nemotron": ("Nemotron", {}),
    "arcee": ("Arcee", {}),
    "phi2": ("Phi", NO_HEAD_DIM),
    "seed_oss": ("SeedOss", {}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", NO_HEAD_DIM),
    "starcoder2": ("Starcoder2", {**NO_HEAD_DIM, "sliding_window": None}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gptneox": ("GPTNeoX", {"rotary_pct": 0.5, "hidden_act": "gelu_new"}),
    "mamba": ("Mamba", {"state_size": 8}),
}
"""Name -> prefix of the classes of transformers, and settings."""
OWN_SETTINGS = {
    "GPT2": ("vocab_size", "bos_token_id", "eos_token_id"),
    "GPTNeoX": tuple(key for key in COMMON if key not in ("num_key_value_heads", "head_dim")),
    "Mamba": ("vocab_size", "hidden_size"),
}
"""Classes that don't take all common settings."""
HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def random_model(name: str, dtype: str = "float32", **settings: Any) -> Any:
    """A model of transformers with random weights."""
    import torch
    import transformers

    prefix, own = FAMILIES[name]
    names = OWN_SETTINGS.get(prefix, tuple(COMMON))
    given = {**{key: COMMON[key] for key in names}, **own, **settings}
    given = {key: value for key, value in given.items() if key != "head_dim" or value is not None}
    config = getattr(transformers, f"{prefix}Config")(**given)
    model = getattr(transformers, HEADS.get(prefix, f"{prefix}ForCausalLM"))(config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if "A_log" in parameter:
                continue
            noise = torch.randn(values.shape, generator=random)
            if values.ndim == 1:
                values.add_(0.1 * noise)
            else:
                values.copy_(noise * values.shape[-1] ** -0.5)
    return model.to(getattr(torch, dtype)).eval()


def write_tokenizer(folder: Path, **config: Any) -> None:
    """Write a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(model: Any, folder: Path, **saving: Any) -> Path:
    """Write the folder of a model with a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder)
    return folder


def logits_of(model: Any, ids: list[int]) -> Logits:
    """(len(ids), vocabulary) float32."""
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float().numpy())


def own_logits(folder: Path, **options: Any) -> Logits:
    """Our logits of the last of IDS."""
    settings: Any = {"device": "cpu", "kv": "f32", "draft": None, "threads": 1, "context": 128, **options}
    with edgeinfer.load(folder, **settings) as model:
        return np.asarray(model.logits(IDS))
