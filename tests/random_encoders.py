"""The random encoders of the tests: one or more for every architecture."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgeinfer.model_config.architectures import ARCHITECTURES
from tests.random_models import VOCABULARY, RandomModel

Shapes = dict[str, tuple[int, ...]]
_QKV = ("attn_q", "attn_k", "attn_v")
_ALL_BIASES = (*_QKV, "attn_output", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class RandomEncoder(RandomModel):
    """One file of an encoder. `labels`: classes of a reranker, 0: it has no classifier; `dense`: outputs of
    the first dense layer after pooling, 0: none.
    """

    kv_heads: int = 4
    tied: bool = True
    labels: int = 0
    dense: int = 0
    every_moe: int = 0
    """Every n-th layer has experts; 0: none."""

    def metadata(self) -> dict[str, Any]:
        own: dict[str, Any] = {"attention.causal": False}
        if self.labels:
            own["pooling_type"] = 4
            own["classifier.output_labels"] = [f"label {number}" for number in range(self.labels)]
        if self.every_moe:
            own["moe_every_n_layers"] = self.every_moe
        if self.dense:
            own |= {"dense_2_feat_in": self.width, "dense_2_feat_out": self.dense}
            own |= {"dense_3_feat_in": self.dense, "dense_3_feat_out": self.width}
        return {
            **super().metadata(),
            **{f"{self.architecture}.{key}": value for key, value in own.items()},
            **({} if self.architecture == "gemma-embedding" else word_pieces()),
            "tokenizer.ggml.token_type_count": 2,
        }

    def tensors(self) -> Shapes:
        spec, width = ARCHITECTURES[self.architecture], self.width
        assert spec.encoder is not None
        biased = spec.encoder.normed_sums
        shapes: Shapes = {"token_embd.weight": (VOCABULARY, width)}
        if spec.embedding_norm != "none":
            shapes |= _norm("token_embd_norm", width, biased)
        if spec.output_norm:
            shapes |= _norm(spec.output_norm, width, False)
        if spec.encoder.learned_positions:
            shapes["position_embd.weight"] = (self.context, width)
        if spec.encoder.token_types:
            shapes["token_types.weight"] = (2, width)
        for layer in range(self.layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self.layer_tensors(layer).items()}
        return shapes | self._head_tensors()

    def _head_tensors(self) -> Shapes:
        shapes: Shapes = {}
        if self.labels:
            shapes |= {"cls.weight": (self.width, self.width), "cls.output.weight": (self.labels, self.width)}
            shapes["cls.output.bias"] = (self.labels,)
            extra = "cls.norm.weight" if self.architecture == "modern-bert" else "cls.bias"
            shapes[extra] = (self.width,)
        if self.dense:
            shapes |= {"dense_2.weight": (self.dense, self.width), "dense_3.weight": (self.width, self.dense)}
        return shapes

    def layer_tensors(self, layer: int) -> Shapes:
        spec, width = ARCHITECTURES[self.architecture], self.width
        assert spec.encoder is not None
        experts = self.experts if self.every_moe and layer % self.every_moe == 1 else 0
        shapes: Shapes = replace(self, experts=experts).decoder_tensors(layer)
        shapes = {name: shape for name, shape in shapes.items() if "norm.bias" not in name}
        if spec.encoder.normed_sums:
            for name in ("attn_output_norm", "layer_output_norm"):
                shapes |= _norm(name, width, True)
        if layer == 0 and not spec.encoder.first_norm:
            del shapes["attn_norm.weight"]
        if spec.qk_norm == "row" and self.qk_norm:
            shapes |= {"attn_q_norm.bias": (width,), "attn_k_norm.bias": (width,)}
        return shapes

    def decoder_tensors(self, layer: int) -> Shapes:
        return super().layer_tensors(layer)


def word_pieces() -> dict[str, Any]:
    """A WordPiece vocabulary of letters and pairs of them."""
    vowels, consonants = "aeiou", "bcdfghklmnprstvw"
    pairs = [first + second for first in consonants for second in vowels]
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*(f"▁{piece}" for piece in (*letters, *pairs)), *letters, *pairs[:64]]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    tokens += [f"[unused{index}]" for index in range(VOCABULARY - len(tokens))]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 5 + [1] * (VOCABULARY - 5), np.int32),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def _norm(name: str, width: int, biased: bool) -> Shapes:
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if biased else {})}


_GEMMA: dict[str, Any] = {
    "layers": 7,
    "kv_heads": 1,
    "head_dim": 32,
    "extra": {"attention.sliding_window": 8, "rope.freq_base": 1000000.0, "pooling_type": 1},
}
ENCODER_ZOO: dict[str, RandomEncoder] = {
    "bert": RandomEncoder("bert", biases=_ALL_BIASES, extra={"pooling_type": 2}),
    "bert-reranker": RandomEncoder("bert", biases=_ALL_BIASES, labels=1),
    "bert-odd": RandomEncoder(
        "bert", width=72, heads=3, kv_heads=3, head_dim=24, feed_forward=144, biases=_ALL_BIASES
    ),
    "gemma-embedding": RandomEncoder("gemma-embedding", **_GEMMA),
    "gemma-embedding-dense": RandomEncoder("gemma-embedding", **_GEMMA, dense=96),
    "jina-bert-v2": RandomEncoder(
        "jina-bert-v2", heads=6, kv_heads=6, width=96, biases=(*_ALL_BIASES[:4], "ffn_down")
    ),
    "jina-bert-v2-unnormed": RandomEncoder(
        "jina-bert-v2", qk_norm=False, fused_gate=True, biases=(*_ALL_BIASES[:4], "ffn_down")
    ),
    "modern-bert": RandomEncoder(
        "modern-bert",
        layers=4,
        fused=True,
        extra={"attention.sliding_window": 8, "rope.freq_base": 160000.0, "pooling_type": 2},
    ),
    "modern-bert-silu": RandomEncoder(
        "modern-bert",
        layers=4,
        fused=True,
        labels=2,
        extra={
            "attention.sliding_window": 6,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 2000.0,
            "hidden_activation": "silu",
        },
    ),
    "nomic-bert": RandomEncoder(
        "nomic-bert", fused_qkv=True, extra={"rope.freq_base": 1000.0, "pooling_type": 1}
    ),
    "nomic-bert-moe": RandomEncoder(
        "nomic-bert-moe",
        layers=4,
        fused_qkv=True,
        experts=8,
        experts_per_token=2,
        every_moe=2,
        biases=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        extra={"rope.freq_base": 10000.0, "pooling_type": 1},
    ),
}
TEXTS = tuple(
    np.random.default_rng(number).integers(3, VOCABULARY, count).tolist()
    for number, count in enumerate((24, 1, 9, 40))
)
"""Token ids of texts of different lengths."""
