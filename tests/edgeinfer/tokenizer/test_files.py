"""Tokenizers of GGUF files."""

from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.tokenizer import Tokenizer, TokenType
from edgeinfer_quant_formats import GGUFFile, GGUFWriter

BUILT_IN = sorted((Path(edgeinfer.__file__).parent / "builtin").glob("edgeinfer-tiny-[!h]*.gguf"))
"""The models with a vocabulary: a draft head has that of its model."""
TEXT = "Once upon a time, Lily — über 你好 👩\u200d👧!\n\n  She said: 'I'll go.'"


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_the_built_in_models_round_trip_any_text(path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.decode(tokenizer.encode(TEXT, bos=True)) == TEXT
    assert tokenizer.eos_id in tokenizer.end_ids
    assert tokenizer.warnings == ()


def test_a_tokenizer_implements_the_engine_protocol() -> None:
    tokenizer: TextTokenizer = Tokenizer.from_gguf(BUILT_IN[0])
    assert tokenizer.token_bytes(tokenizer.encode("a", bos=True)[-1]) == b"a"


def test_chat_templates_of_the_built_in_models_encode_to_special_tokens() -> None:
    for path in BUILT_IN:
        with GGUFFile.open(path) as file:
            tokenizer = Tokenizer.from_metadata(file.metadata)
            chat_format = ChatFormat.from_metadata(file.metadata, tokenizer)
        text = chat_format.render([{"role": "user", "content": "Hi"}])
        ids = tokenizer.encode(text, special=True)
        assert tokenizer.decode(ids, special=True) == text
        assert any(tokenizer.token_type(token) == TokenType.CONTROL for token in ids)


def test_the_built_in_models_share_their_vocabulary() -> None:
    first, second = (Tokenizer.from_gguf(path) for path in BUILT_IN)
    assert first.vocabulary.texts == second.vocabulary.texts
    assert first.end_ids == second.end_ids


def test_a_file_with_a_vocabulary_alone_opens(tmp_path: Path, sentence_pieces: Any) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, sentence_pieces.metadata).write()
    from_file, from_metadata = Tokenizer.from_gguf(path), Tokenizer.from_metadata(sentence_pieces.metadata)
    for text in sentence_pieces.texts:
        assert from_file.encode(text) == from_metadata.encode(text)


def test_the_pre_tokenizer_of_a_file_can_be_replaced(tmp_path: Path, byte_pairs: Any) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, byte_pairs.metadata | {"tokenizer.ggml.pre": "tomorrow-bpe"}).write()
    assert Tokenizer.from_gguf(str(path), unknown_pre="gpt-2").encode("a b") != []
