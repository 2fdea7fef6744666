"""Texts as vectors: what a model knows of a whole text, for comparing texts with each other."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SettingError
from edgeinfer.shown import shown

Pooling = Literal["mean", "cls", "last"]
Vectors = npt.NDArray[np.float32]

_BY_NUMBER: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
"""Source: gguf's `PoolingType`; 0 is none, 4 ranks pairs of texts."""


class TextVectors(NamedTuple):
    """Vectors (texts, width) float32, and how many tokens were read for them."""

    vectors: Vectors
    tokens: int


def pooling_of(number: object) -> Pooling:
    """What a file's `pooling_type` asks for; the mean where it names nothing that makes one vector."""
    return _BY_NUMBER.get(number, "mean") if isinstance(number, int) else "mean"


def check_pooling(wished: str) -> Pooling:
    """Raises `SettingError` for a name that isn't one of `Pooling`."""
    for name in get_args(Pooling) if isinstance(wished, str) else ():
        if name == wished:
            return name  # type: ignore[no-any-return]
    raise SettingError(f"pooling: saw {shown(wished)}, wanted {', '.join(get_args(Pooling))}")


def checked_texts(texts: object) -> list[str]:
    """All of them. Raises `SettingError` for what isn't texts."""
    given: list[str] = []
    for text in texts if isinstance(texts, Iterable) else (texts,):
        if not isinstance(text, str):
            saw = f"{type(text).__name__} {shown(text)}"
            raise SettingError(f"embed: saw {saw}, wanted a text, or texts")
        given.append(text)
    return given


def pooled(rows: Vectors, pooling: Pooling, normalize: bool) -> Vectors:
    """One vector (width,) float32 of a text's rows (tokens, width): their mean, the first or the last.

    `normalize`: of length 1, so that the product of two vectors is the cosine between them.
    """
    if pooling == "mean":
        found = rows.mean(axis=0, dtype=np.float64)
    else:
        found = rows[0 if pooling == "cls" else -1].astype(np.float64)
    if normalize:
        found /= max(float(np.linalg.norm(found)), 1e-12)
    return np.asarray(found, np.float32)
