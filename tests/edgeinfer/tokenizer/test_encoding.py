"""Rules of encoding and decoding: BOS and EOS, special tokens, spaces, bytes, bad ids."""

from typing import Any

import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.tokenizer import Tokenizer, TokenType


@pytest.fixture
def pieces(sentence_pieces: Any) -> Tokenizer:
    return Tokenizer.from_metadata(sentence_pieces.metadata)


@pytest.fixture
def pairs(byte_pairs: Any) -> Tokenizer:
    return Tokenizer.from_metadata(byte_pairs.metadata_of("gpt-2"))


def test_bos_is_added_only_if_requested_and_set_in_the_file(sentence_pieces: Any) -> None:
    wants = Tokenizer.from_metadata(sentence_pieces.metadata)
    refuses = Tokenizer.from_metadata(sentence_pieces.metadata | {"tokenizer.ggml.add_bos_token": False})
    assert wants.encode("", bos=True) == [1]
    assert wants.encode("") == []
    assert refuses.encode("", bos=True) == []


def test_eos_is_added_if_set_in_the_file(sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata | {"tokenizer.ggml.add_eos_token": True})
    assert tokenizer.add_eos
    assert tokenizer.encode("a", bos=True)[-1] == tokenizer.eos_id
    assert tokenizer.encode("a")[-1] != tokenizer.eos_id


def test_control_tokens_are_parsed_only_if_requested(pairs: Tokenizer) -> None:
    control = pairs.vocabulary.ids["<|im_end|>"]
    assert control in pairs.encode("a<|im_end|>b", special=True)
    assert control not in pairs.encode("a<|im_end|>b")


def test_user_defined_tokens_are_always_parsed(pairs: Tokenizer) -> None:
    defined = pairs.vocabulary.ids["<ud>"]
    assert pairs.encode("<ud><ud>") == [defined, defined]
    assert pairs.token_type(defined) == TokenType.USER_DEFINED


def test_control_tokens_are_decoded_only_if_requested(pairs: Tokenizer) -> None:
    ids = pairs.encode("a<|im_end|>b<ud>", special=True)
    assert pairs.decode(ids) == "ab<ud>"
    assert pairs.decode(ids, special=True) == "a<|im_end|>b<ud>"


def test_a_space_is_added_before_the_text_and_after_special_tokens(pieces: Tokenizer) -> None:
    ids = pieces.encode("the<ud>the")
    assert pieces.token_bytes(ids[0]).startswith(b" ")
    assert b"".join(map(pieces.token_bytes, ids)) == b" the<ud> the"
    assert pieces.decode(ids) == "the<ud>the"


def test_spaces_of_the_text_are_kept_with_the_space_prefix(pieces: Tokenizer) -> None:
    for text in (" a", "  a", " ", "   ", "a ", " <ud> a", "<s> a"):
        assert pieces.decode(pieces.encode(text, special=True), special=True) == text


def test_decoding_skips_bos_and_still_strips_the_space_prefix(pieces: Tokenizer) -> None:
    assert pieces.decode(pieces.encode("the end", bos=True)) == "the end"


def test_a_character_without_a_piece_falls_back_to_its_bytes(pieces: Tokenizer) -> None:
    ids = pieces.encode("\U0001f9ff")
    assert [pieces.token_bytes(token) for token in ids[-4:]] == [b"\xf0", b"\x9f", b"\xa7", b"\xbf"]
    assert pieces.token_type(ids[-1]) == TokenType.BYTE


def test_without_byte_tokens_each_byte_becomes_the_unknown_token() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
    }
    assert Tokenizer.from_metadata(metadata).encode("aé") == [3, 4, 0, 0]


def test_a_lone_surrogate_becomes_the_replacement_character(pairs: Tokenizer, pieces: Tokenizer) -> None:
    assert pairs.encode("a\ud800b\udc41") == pairs.encode("a\ufffdb\ufffd")
    assert pieces.decode(pieces.encode("\ud83d\ude00 \udfff")) == "\U0001f600 \ufffd"


def test_bytes_that_are_not_utf8_decode_to_the_replacement_character(pieces: Tokenizer) -> None:
    byte = pieces.vocabulary.ids["<0xFF>"]
    assert pieces.decode([byte]) == "\ufffd"


def test_longer_special_tokens_are_found_before_shorter_ones() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<ab", "b>cd>", "▁", "<", "a"],
        "tokenizer.ggml.token_type": [2, 3, 3, 4, 4, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert Tokenizer.from_metadata(metadata).encode("<ab>cd>") == [6, 7, 4]


def test_special_tokens_of_phi_3_strip_the_following_space(sentence_pieces: Any) -> None:
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata_of("phi-3"))
    assert tokenizer.encode("<|ctl|> \n the", special=True) == tokenizer.encode("<|ctl|>the", special=True)
    assert tokenizer.encode("<s> the", special=True) != tokenizer.encode("<s>the", special=True)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_named(token: int, pieces: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=f"token {token}: wanted an id from 0 to {pieces.vocabulary_size - 1}"
    ):
        pieces.decode([token])


def test_unused_tokens_decode_to_nothing(sentence_pieces: Any) -> None:
    types = sentence_pieces.metadata["tokenizer.ggml.token_type"].copy()
    types[300], types[301] = TokenType.UNUSED, 17
    tokenizer = Tokenizer.from_metadata(sentence_pieces.metadata | {"tokenizer.ggml.token_type": types})
    assert tokenizer.decode([300, 301]) == ""
    assert tokenizer.token_type(301) == TokenType.UNUSED


def test_an_unknown_tokenizer_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'hybriddna'; wanted one of llama, gpt2, gemma4.*engine='llama"
    ):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "hybriddna"})
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model: missing"):
        Tokenizer.from_metadata({})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", None, "tokens: missing; wanted a list of texts"),
        ("tokens", [1, 2], "tokens: a list; wanted a list of texts"),
        ("merges", None, "merges: missing; wanted a list of texts"),
        ("merges", "a b", "merges: a str; wanted a list of texts"),
        ("scores", [1.0], "scores: 1 values of type float64; wanted a number for each of the 1161 tokens"),
        ("token_type", ["x"] * 1161, "token_type: 1161 values of type <U1; wanted a number for each"),
    ],
)
def test_a_damaged_list_is_named(key: str, value: Any, message: str, byte_pairs: Any) -> None:
    metadata = byte_pairs.metadata_of("gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(UnsupportedModelError, match=message):
        Tokenizer.from_metadata(metadata)


@pytest.mark.slow
def test_tokenization_time_is_linear_in_repeated_characters(byte_pairs: Any, pieces: Tokenizer) -> None:
    pairs = Tokenizer.from_metadata(byte_pairs.metadata_of("llama-bpe"))
    for tokenizer in (pairs, pieces):
        for character in ("a", " ", "\n", "7", "é", "中"):
            text = character * 30_000
            assert tokenizer.decode(tokenizer.encode(text)) == text
