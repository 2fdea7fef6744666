"""Text embeddings: vectors for comparing texts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.encoder_engine import EncoderEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError, shown

Pooling = Literal["mean", "cls", "last"]
Vectors = npt.NDArray[np.float32]

_BY_NUMBER: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
"""Source: gguf's `PoolingType`; 0 is none, 4 ranks pairs of texts."""


class TextVectors(NamedTuple):
    """Vectors (texts, hidden_size) float32, and the number of tokens processed."""

    vectors: Vectors
    tokens: int


def pooling_of(number: object) -> Pooling:
    """The pooling for a file's `pooling_type`; "mean" if the value selects none that gives one vector."""
    return _BY_NUMBER.get(number, "mean") if isinstance(number, int) else "mean"


def check_pooling(pooling: str) -> Pooling:
    """Raises `SettingError` for a name that isn't one of `Pooling`."""
    for name in get_args(Pooling) if isinstance(pooling, str) else ():
        if name == pooling:
            return name  # type: ignore[no-any-return]
    raise SettingError(f"pooling: saw {shown(pooling)}, wanted {', '.join(get_args(Pooling))}")


def checked_texts(texts: object, method: str = "embed") -> list[str]:
    """The texts as a list. Raises `SettingError` if a value isn't a text."""
    given: list[str] = []
    for text in texts if isinstance(texts, Iterable) else (texts,):
        if not isinstance(text, str):
            saw = f"{type(text).__name__} {shown(text)}"
            raise SettingError(f"{method}: saw {saw}, wanted a text, or texts")
        given.append(text)
    return given


def text_rows(engine: Engine, texts: Sequence[list[int]]) -> Iterator[Vectors]:
    """The hidden states (tokens, hidden_size) of each text before the output head; an encoder processes
    several texts in one step.
    """
    if isinstance(engine, EncoderEngine):
        yield from engine.text_rows(texts)
        return
    for ids in texts:
        engine.rewind(0)
        yield engine.rows(ids)


def normalized(vectors: Vectors) -> Vectors:
    """The vectors (texts, size) scaled to length 1, so that the dot product of two is their cosine
    similarity.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def cosine_similarities(vectors: Sequence[Vectors]) -> Vectors:
    """The cosine similarity of each two vectors, (vectors, vectors) float32."""
    of_length_one = normalized(np.stack(vectors))
    return of_length_one @ of_length_one.T


def pooled(rows: Vectors, pooling: Pooling) -> Vectors:
    """One vector (hidden_size,) float32 from hidden states (tokens, hidden_size): their mean, the first or
    the last.
    """
    if pooling == "mean":
        vector = rows.mean(axis=0, dtype=np.float64)
    else:
        vector = rows[0 if pooling == "cls" else -1].astype(np.float64)
    return np.asarray(vector, np.float32)
