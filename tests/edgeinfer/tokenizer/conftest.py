"""Small vocabularies with llama.cpp's ids of odd texts (see data/make_tokenizer_goldens.py)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.edgeinfer.tokenizer.charsmap_writer import charsmap

DATA = Path(__file__).parents[1] / "data" / "tokenizer"


@dataclass(frozen=True)
class Goldens:
    """A vocabulary, texts, and their llama.cpp ids for each variant of the metadata."""

    metadata: dict[str, Any]
    texts: list[str]
    variants: dict[str, tuple[dict[str, Any], list[int]]]
    ids: list[list[list[int]]]

    def metadata_of(self, variant: str) -> dict[str, Any]:
        return self.metadata | self.variants[variant][0]

    def cases_of(self, variant: str) -> Iterator[tuple[str, bool, list[int]]]:
        """Yield text, whether special tokens and BOS are on, and the ids."""
        for index, item in enumerate(self.variants[variant][1]):
            special = index >= len(self.texts)
            yield self.texts[index % len(self.texts)], special, self.ids[index][item]


def read(name: str) -> Goldens:
    content = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    for key, dtype in (("token_type", np.int32), ("scores", np.float32)):
        values = content["metadata"].get(f"tokenizer.ggml.{key}")
        if values is not None:
            content["metadata"][f"tokenizer.ggml.{key}"] = np.array(values, dtype)
    key = "tokenizer.ggml.precompiled_charsmap"
    if key in content["metadata"]:
        content["metadata"][key] = charsmap(content["metadata"][key])
    return Goldens(**content)


@pytest.fixture(scope="session")
def byte_pairs() -> Goldens:
    return read("byte_pair")


@pytest.fixture(scope="session")
def raw_byte_pairs() -> Goldens:
    return read("raw_byte_pair")


@pytest.fixture(scope="session")
def sentence_pieces() -> Goldens:
    return read("sentence_piece")


@pytest.fixture(scope="session")
def word_pieces() -> Goldens:
    return read("word_piece")


@pytest.fixture(scope="session")
def unigrams() -> Goldens:
    return read("unigram")


@pytest.fixture(scope="session")
def plamo_pieces() -> Goldens:
    return read("plamo")
