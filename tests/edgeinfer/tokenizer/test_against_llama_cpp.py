"""The same ids, pieces and end tokens as llama.cpp itself, on random texts."""

# ruff: noqa: RUF001 - odd texts are the point
import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.llama_cpp.library import log_catcher
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.tokenizer.pre_tokenizers import families
from edgeinfer_quant_formats import GGUFWriter

pytestmark = pytest.mark.llama_cpp

BUILT_IN = sorted((Path(edgeinfer.__file__).parent / "builtin").glob("edgeinfer-tiny-[!h]*.gguf"))
"""The models with a vocabulary: a draft head has that of its model."""
ALPHABETS = (
    "abcXYZ 'sStTmM\"lLvVeErRdD",
    "0123456789 ٠١٢३४Ⅷ½,.",
    "   \t\n\r\v\f\u00a0\u2003\u3000\u2028\u0085\u200b\ufeffa",
    ".,!?;:-_()[]{}<>/\\|@#$%^&*+=~`\"'\n",
    "中文字符漢。、ひカー한가ไทยहि\u093fع،",
    "e\u0301\u0308éüßñАБΩǅʰªſKİ 😀\u200d👩🏽🇩🇪𝔘𝟘𐐀",
    "\x01\x1c\x1f\x7f\U00020000\U0002f800\u0378\ue000\U0010ffff \n",
)
SPECIAL = ("<|im_end|>", "<s>", "</s>", "<ud>", "<|ctl|>", "<|endoftext|>", "<0x41>", "<unk>")


def random_texts(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            alphabet = rng.choice(ALPHABETS)
            parts.append("".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 7))))
            parts.append(rng.choice(["", "", " ", rng.choice(SPECIAL), chr(rng.randrange(0x20, 0xD800))]))
        yield "".join(parts)


class LlamaVocabulary:
    """A vocabulary as llama.cpp reads it."""

    def __init__(self, path: Path) -> None:
        self.library = pytest.importorskip("llama_cpp")
        log_catcher().clear()
        parameters = self.library.llama_model_default_params()
        parameters.vocab_only = True
        self.model = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        assert self.model
        self.vocabulary = self.library.llama_model_get_vocab(self.model)

    def encode(self, text: str, special: bool) -> list[int]:
        data = text.encode()
        room = (self.library.llama_token * (len(data) + 16))()
        count = self.library.llama_tokenize(
            self.vocabulary, data, len(data), room, len(room), special, special
        )
        return list(room[:count])

    def piece(self, token: int) -> bytes:
        room = ctypes.create_string_buffer(512)
        count = self.library.llama_token_to_piece(self.vocabulary, token, room, len(room), 0, True)
        return room.raw[:count]

    def ends(self, token: int) -> bool:
        return bool(self.library.llama_vocab_is_eog(self.vocabulary, token))

    def close(self) -> None:
        self.library.llama_model_free(self.model)


def compare(path: Path, texts: int, seed: int) -> None:
    ours, theirs = Tokenizer.from_gguf(path), LlamaVocabulary(path)
    for text in random_texts(texts, seed):
        for special in (False, True):
            assert ours.encode(text, bos=special, special=special) == theirs.encode(text, special), ascii(
                text
            )
    every = range(ours.vocabulary_size)
    assert [ours.token_bytes(token) for token in every] == [theirs.piece(token) for token in every]
    assert {token for token in every if theirs.ends(token)} == ours.end_ids
    theirs.close()


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_a_built_in_model_agrees_with_llama_cpp(path: Path) -> None:
    compare(path, texts=250, seed=1)


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", families())
def test_a_pre_tokenizer_agrees_with_llama_cpp_on_random_texts(
    name: str, byte_pairs: Any, tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, byte_pairs.metadata_of(name)).write()
    compare(path, texts=60, seed=2)


@pytest.mark.parametrize("kind", ["sentence_pieces", "raw_byte_pairs"])
def test_pieces_over_utf8_agree_with_llama_cpp_on_random_texts(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, request.getfixturevalue(kind).metadata).write()
    compare(path, texts=250, seed=3)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *(("word_pieces", variant) for variant in ("uncased", "cased", "accents", "cased without accents")),
        *(("unigrams", variant) for variant in ("xlm-r", "all spaces", "no space prefix", "merged spaces")),
        ("plamo_pieces", "plain"),
    ],
)
def test_tokenizers_of_encoders_agree_with_llama_cpp_on_random_texts(
    kind: str, variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, request.getfixturevalue(kind).metadata_of(variant)).write()
    compare(path, texts=250, seed=5)


@pytest.mark.parametrize("variant", ["whitespace", "lowercase"])
def test_byte_pairs_without_whitespace_agree_with_llama_cpp_on_random_texts(
    variant: str, raw_byte_pairs: Any, tmp_path: Path
) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, raw_byte_pairs.metadata_of(variant)).write()
    # Pieces are not compared: llama.cpp shows those with characters beyond ASCII as bytes.
    ours, theirs = Tokenizer.from_gguf(path), LlamaVocabulary(path)
    for text in random_texts(400, seed=6):
        assert ours.encode(text, special=True) == theirs.encode(text, special=True), ascii(text)
    theirs.close()


def test_a_vocabulary_with_gaps_agrees_with_llama_cpp(byte_pairs: Any, tmp_path: Path) -> None:
    metadata = byte_pairs.metadata_of("gpt-2")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for index in (0, 5, 70, 180, 230, 300, 333, 400, 512):
        tokens[index] = f"gone {index}"
    merges = metadata["tokenizer.ggml.merges"]
    path = tmp_path / "vocabulary.gguf"
    gaps = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [*merges[5:], merges[9], merges[3]]}
    GGUFWriter(path, metadata | gaps).write()
    ours, theirs = Tokenizer.from_gguf(path), LlamaVocabulary(path)
    for text in random_texts(600, seed=4):
        assert ours.encode(text) == theirs.encode(text, special=False), ascii(text)
    theirs.close()
