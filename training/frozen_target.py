"""The frozen target of a draft head in torch: its hidden states, and rows of text that it writes.

Targets are Llama-like, with RoPE of neighboring pairs and an ungated squared-ReLU feed-forward (GGUF
`arcee`), as the built-in model.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edgeinfer_quant_formats import GGUFFile

LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a layer: queries, keys and values (rows, heads, tokens, size of a head) to their mix."""


class Target:
    """A target on a device, in float32."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.file, self.device = GGUFFile.open(path), device
        meta = self.file.metadata
        self.name = str(meta["general.architecture"])

        def count(key: str) -> int:
            return int(meta[f"{self.name}.{key}"])

        self.layers, self.width = count("block_count"), count("embedding_length")
        self.heads, self.kv_heads = count("attention.head_count"), count("attention.head_count_kv")
        self.head_dim, self.context = count("attention.key_length"), count("context_length")
        self.rope_base = float(meta[f"{self.name}.rope.freq_base"])
        self.epsilon = float(meta[f"{self.name}.attention.layer_norm_rms_epsilon"])
        self.cos, self.sin = self._rotations()
        self.embedding, self.norm = self.tensor("token_embd.weight"), self.tensor("output_norm.weight")
        is_tied = "output.weight" not in self.file.tensors
        self.output = self.embedding if is_tied else self.tensor("output.weight")
        self.weights = [
            {name: self.tensor(f"blk.{layer}.{name}.weight") for name in LAYER}
            for layer in range(self.layers)
        ]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file."""
        return read_tensor(self.file, name).to(self.device)

    def rope(self, x: Tensor, first: int) -> Tensor:
        """Rotated heads (rows, heads, tokens, head_dim) of positions first…"""
        end = first + x.shape[-2]
        return self.rotated(x, self.cos[first:end], self.sin[first:end])

    @staticmethod
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads rotated by angles; neighbours are a pair."""
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.epsilon)

    def layer(self, x: Tensor, layer: int, first: int, attention: Attention) -> Tensor:
        w = self.weights[layer]
        y = self.normed(x, w["attn_norm"])

        def heads(name: str, count: int) -> Tensor:
            return functional.linear(y, w[name]).unflatten(-1, (count, -1)).transpose(1, 2)

        q = self.rope(heads("attn_q", self.heads), first)
        k = self.rope(heads("attn_k", self.kv_heads), first)
        mixed = attention(q, k, heads("attn_v", self.kv_heads)).transpose(1, 2).flatten(2)
        x = x + functional.linear(mixed, w["attn_output"])
        hidden = functional.relu(functional.linear(self.normed(x, w["ffn_norm"]), w["ffn_up"])).square()
        return x + functional.linear(hidden, w["ffn_down"])

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """(rows, tokens, width): the hidden states after the output norm."""
        with torch.autocast(self.device.type, enabled=False):
            x = functional.embedding(ids, self.embedding)
            for layer in range(self.layers):
                x = self.layer(x, layer, 0, causal_attention)
            return self.normed(x, self.norm)

    def _rotations(self) -> tuple[Tensor, Tensor]:
        """(positions, head_dim / 2): the cosines and sines of all positions' angles."""
        half = self.head_dim // 2
        rates = self.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(self.context, dtype=torch.float64), rates)
        return angles.cos().float().to(self.device), angles.sin().float().to(self.device)


def read_tensor(file: GGUFFile, name: str) -> Tensor:
    """A tensor of a file in float32, on the CPU."""
    values = np.array(file.decode(name), np.float32)
    return torch.from_numpy(values.reshape(file.tensors[name].shape))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of whole rows; several heads share keys and values."""
    if q.device.type == "cuda":  # whose fast kernels are of 16 bits
        q, k, v = q.half(), k.half(), v.half()
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).float()


class Decoder:
    """Decodes rows of text together, one token of each at a time."""

    def __init__(self, target: Target, rows: int, tokens: int) -> None:
        size = (target.layers, 2, rows, target.kv_heads, tokens, target.head_dim)
        dtype = torch.float16 if target.device.type == "cuda" else torch.float32
        self._target, self._cache = target, torch.zeros(size, dtype=dtype, device=target.device)

    @torch.no_grad()
    def logits(self, ids: Tensor, position: int) -> Tensor:
        """(rows, vocabulary): the logits after one more token of each row."""
        t, groups = self._target, self._target.heads // self._target.kv_heads
        x = functional.embedding(ids[:, None], t.embedding)
        for layer in range(t.layers):

            def attention(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                keys, values = self._cache[layer]
                keys[:, :, position], values[:, :, position] = k[:, :, 0], v[:, :, 0]
                end = position + 1
                grouped = q.view(len(q), t.kv_heads, groups, t.head_dim).to(keys.dtype)
                mixed = functional.scaled_dot_product_attention(grouped, keys[:, :, :end], values[:, :, :end])
                return mixed.float().reshape(q.shape)

            x = t.layer(x, layer, position, attention)
        return functional.linear(t.normed(x, t.norm)[:, 0], t.output)
