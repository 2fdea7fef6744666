"""Every pre-tokenizer and every kind of vocabulary gives the ids that llama.cpp gives."""

from typing import Any

import pytest
from tokenizers.models import BPE

from edgeinfer.tokenizer import Tokenizer, known_pre_tokenizers
from edgeinfer.tokenizer.encoders.byte_pair import CHARACTER_OF_BYTE, to_byte_alphabet
from edgeinfer.tokenizer.encoders.merging import merge
from edgeinfer.tokenizer.pre_tokenizers import pre_tokenizer


def differing(goldens: Any, variant: str, tokenizer: Tokenizer) -> list[tuple[str, list[int], list[int]]]:
    return [
        (text, result, expected)
        for text, special, expected in goldens.cases_of(variant)
        if (result := tokenizer.encode(text, bos=special, special=special)) != expected
    ]


@pytest.mark.parametrize("name", known_pre_tokenizers())
def test_a_pre_tokenizer_gives_the_ids_of_llama_cpp(name: str, byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(byte_pairs.metadata_of(name))
    assert differing(byte_pairs, name, tokenizer) == []


@pytest.mark.parametrize("name", known_pre_tokenizers())
def test_byte_pairs_round_trip_text(name: str, byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(byte_pairs.metadata_of(name))
    if pre_tokenizer(name).byte_level:
        assert [tokenizer.decode(tokenizer.encode(text)) for text in byte_pairs.texts] == byte_pairs.texts


@pytest.mark.parametrize("variant", ["gemma4", "whitespace", "lowercase"])
def test_byte_pairs_over_raw_utf8_give_the_ids_of_llama_cpp(variant: str, raw_byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(raw_byte_pairs.metadata_of(variant))
    assert differing(raw_byte_pairs, variant, tokenizer) == []


@pytest.mark.parametrize("variant", ["plain", "no space prefix", "eos", "phi-3"])
def test_sentence_pieces_give_the_ids_of_llama_cpp(variant: str, sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata_of(variant))
    assert differing(sentence_pieces, variant, tokenizer) == []


@pytest.mark.parametrize("variant", ["plain", "no space prefix"])
def test_sentence_pieces_round_trip_text(variant: str, sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata_of(variant))
    texts = [text for text in sentence_pieces.texts if "▁" not in text]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_merging_equals_the_tokenizers_library(byte_pairs: Any) -> None:
    merges = dict.fromkeys(byte_pairs.metadata_of("gpt-2")["tokenizer.ggml.merges"])
    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in merges)]
    symbols = sorted({*CHARACTER_OF_BYTE.values(), *(left + right for left, right in pairs)}.union(*pairs))
    oracle = BPE({symbol: index for index, symbol in enumerate(symbols)}, pairs)
    ranks = {pair: index for index, pair in enumerate(merges)}
    for text in byte_pairs.texts:
        spelled = to_byte_alphabet(text.encode("utf-8", "replace").decode())
        assert merge(spelled, ranks, " ") == [token.value for token in oracle.tokenize(spelled)]
