"""The head of a file after pooling: dense layers of embeddings, and the classifier of a reranker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.matrix import Vector
from edgeinfer_kernels.reference.blocks.feed_forward import activate
from edgeinfer_kernels.reference.step import normalize
from edgeinfer_quant_formats import GGUFFile

HEAD_TENSORS = ("cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias")
DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")
SOFTMAX_ARCHITECTURES = ("qwen3", "qwen3vl")
"""Their rerankers have the classes yes and no."""
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PoolingHead:
    """The matrices after pooling, float32 (outputs, inputs). `dense`: of embeddings. `classifier`: of the
    scores of a reranker, after the hidden layer `hidden` with its norm.

    `labels`: the names of the classifier's outputs, if the file has them.
    """

    dense: tuple[Array, ...] = ()
    hidden: Array | None = None
    hidden_bias: Vector | None = None
    hidden_norm: Vector | None = None
    classifier: Array | None = None
    classifier_bias: Vector | None = None
    labels: tuple[str, ...] = ()
    pooling: Literal["cls", "mean", "last"] = "cls"
    """Of the hidden states that are scored."""
    norm: NormSpec | None = None
    activation: Literal["tanh", "gelu"] = "tanh"
    is_softmax: bool = False
    """Whether scores are probabilities of the classes; else they are logits."""

    @property
    def ranks(self) -> bool:
        """Whether there is a classifier."""
        return self.classifier is not None or self.hidden is not None

    def embedding(self, pooled: Array) -> Array:
        """The embeddings (texts, …) of pooled hidden states (texts, hidden_size)."""
        for matrix in self.dense:
            pooled = pooled @ matrix.T
        return pooled

    def scores(self, pooled: Array) -> Array:
        """(texts, classes) float32: the scores of the classes for pooled hidden states."""
        x = pooled
        if self.hidden is not None:
            x = x @ self.hidden.T + (0 if self.hidden_bias is None else self.hidden_bias)
            x = activate(x, "gelu") if self.activation == "gelu" else np.tanh(x)
            x = x if self.norm is None else normalize(x, self.norm, self.hidden_norm)
        if self.classifier is not None:
            x = x @ self.classifier.T + (0 if self.classifier_bias is None else self.classifier_bias)
        if self.is_softmax:
            x = np.exp(x - x.max(axis=-1, keepdims=True))
            x /= x.sum(axis=-1, keepdims=True)
        return np.asarray(x, np.float32)


def read_pooling_head(file: GGUFFile, config: ModelConfig) -> PoolingHead:
    """The matrices of a file after pooling. Raises `UnsupportedModelError`: misshapen tensors."""
    found = {name: _decoded(file, name) for name in (*HEAD_TENSORS, *DENSE_TENSORS)}
    for names in (DENSE_TENSORS, ("cls.weight", "cls.output.weight")):
        _check_chain({name: matrix for name in names if (matrix := found[name]) is not None}, config.width)
    labels = file.metadata.get(f"{config.architecture}.classifier.output_labels", ())
    pooling = file.metadata.get(f"{config.architecture}.classifier.pooling_type")
    is_modern = config.architecture == "modern-bert"
    pools_mean = pooling == 1 or (pooling is None and is_modern)
    return PoolingHead(
        dense=tuple(matrix for name in DENSE_TENSORS if (matrix := found[name]) is not None),
        hidden=found["cls.weight"],
        hidden_bias=found["cls.bias"],
        hidden_norm=found["cls.norm.weight"],
        classifier=found["cls.output.weight"],
        classifier_bias=found["cls.output.bias"],
        labels=tuple(str(label) for label in labels),
        pooling="last" if not config.is_encoder else "mean" if pools_mean else "cls",
        norm=config.norm if found["cls.norm.weight"] is not None else None,
        activation="gelu" if is_modern else "tanh",
        is_softmax=config.architecture in SOFTMAX_ARCHITECTURES,
    )


def _check_chain(matrices: Mapping[str, Array], inputs: int) -> None:
    """Raises `UnsupportedModelError`: a matrix doesn't read the outputs of the one before it."""
    for name, matrix in matrices.items():
        if matrix.ndim != 2 or matrix.shape[1] != inputs:
            raise UnsupportedModelError(f"{name}: shape {matrix.shape}, wanted (…, {inputs})")
        inputs = len(matrix)


def _decoded(file: GGUFFile, name: str) -> Array | None:
    """A tensor in float32, in the shape of its rows and columns."""
    info = file.tensors.get(name)
    return None if info is None else file.decode(name).reshape(info.shape)
