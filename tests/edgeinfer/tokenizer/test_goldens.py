"""Every pre-tokenizer and every kind of vocabulary gives the ids that llama.cpp gives."""

from typing import Any

import pytest

from edgeinfer.tokenizer import Tokenizer, known_pre_tokenizers
from edgeinfer.tokenizer.pre_tokenizers import pre_tokenizer


def differing(goldens: Any, variant: str, tokenizer: Tokenizer) -> list[tuple[str, list[int], list[int]]]:
    return [
        (text, found, wanted)
        for text, special, wanted in goldens.answers(variant)
        if (found := tokenizer.encode(text, bos=special, special=special)) != wanted
    ]


@pytest.mark.parametrize("name", known_pre_tokenizers())
def test_a_pre_tokenizer_gives_the_ids_of_llama_cpp(name: str, byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(byte_pairs.metadata_of(name))
    assert differing(byte_pairs, name, tokenizer) == []


@pytest.mark.parametrize("name", known_pre_tokenizers())
def test_text_comes_back_from_byte_pairs(name: str, byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(byte_pairs.metadata_of(name))
    if pre_tokenizer(name).byte_level:
        assert [tokenizer.decode(tokenizer.encode(text)) for text in byte_pairs.texts] == byte_pairs.texts


def test_byte_pairs_over_raw_utf8_give_the_ids_of_llama_cpp(raw_byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(raw_byte_pairs.metadata_of("gemma4"))
    assert differing(raw_byte_pairs, "gemma4", tokenizer) == []


@pytest.mark.parametrize("variant", ["plain", "no space prefix", "eos", "phi-3"])
def test_sentence_pieces_give_the_ids_of_llama_cpp(variant: str, sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata_of(variant))
    assert differing(sentence_pieces, variant, tokenizer) == []


@pytest.mark.parametrize("variant", ["plain", "no space prefix"])
def test_text_comes_back_from_sentence_pieces(variant: str, sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata_of(variant))
    texts = [text for text in sentence_pieces.texts if "▁" not in text]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_the_rust_merger_agrees_with_ours_on_every_text(byte_pairs: Any, raw_byte_pairs: Any) -> None:
    for goldens, variant in ((byte_pairs, "gpt-2"), (byte_pairs, "superbpe"), (raw_byte_pairs, "gemma4")):
        tokenizer = Tokenizer.from_metadata(goldens.metadata_of(variant))
        tokenizer._encoder._build_rust()  # type: ignore[union-attr]
        assert tokenizer._encoder._rust is not None  # type: ignore[union-attr]
        assert differing(goldens, variant, tokenizer) == []


def test_both_mergers_agree_where_symbols_are_no_tokens(byte_pairs: Any) -> None:
    metadata = byte_pairs.metadata_of("gpt-2")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for index in (0, 5, 70, 180, 230, 300, 333, 400, 512):
        tokens[index] = f"gone {index}"
    merges = metadata["tokenizer.ggml.merges"]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [*merges, merges[3], "a b c", " "]}
    ours, rust = Tokenizer.from_metadata(metadata), Tokenizer.from_metadata(metadata)
    rust._encoder._build_rust()  # type: ignore[union-attr]
    assert rust._encoder._rust is not None  # type: ignore[union-attr]
    for text in byte_pairs.texts:
        assert rust.encode(text) == ours.encode(text)
