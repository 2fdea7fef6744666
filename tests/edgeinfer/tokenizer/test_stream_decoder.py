"""Tokens one at a time, never an incomplete character."""

import random
from typing import Any

import pytest

from edgeinfer.tokenizer import StreamDecoder, Tokenizer

TEXT = "Grüße, 你好 👨\u200d👩\u200d👧! e\u0301"


def one_byte(token_id: int) -> bytes:
    return bytes([token_id])


def test_a_character_is_emitted_with_its_last_byte() -> None:
    decoder = StreamDecoder(one_byte)
    assert [decoder.push(byte) for byte in "é€😀a".encode()] == ["", "é", "", "", "€", "", "", "", "😀", "a"]
    assert decoder.finish() == ""


def test_invalid_bytes_are_replaced_at_once() -> None:
    decoder = StreamDecoder(one_byte)
    assert decoder.push(0xE2) == ""
    assert decoder.push(0x41) == "\ufffdA"
    assert decoder.push(0xFF) == "\ufffd"
    assert decoder.push(0x80) == "\ufffd"
    assert decoder.push(0xED) == ""
    assert decoder.push(0xA0) == "\ufffd\ufffd"


def test_an_incomplete_character_at_the_end_is_replaced_once() -> None:
    decoder = StreamDecoder(one_byte)
    assert [decoder.push(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""
    assert decoder.push(0x41) == "A"


def test_streaming_equals_decoding_all_bytes() -> None:
    rng = random.Random(11)
    for _ in range(300):
        data = bytes(
            rng.choice([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF]) for _ in range(20)
        )
        decoder = StreamDecoder(one_byte)
        output = "".join(map(decoder.push, data)) + decoder.finish()
        assert output == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ["sentence_pieces", "byte_pairs"])
def test_a_stream_of_tokens_gives_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    goldens: Any = request.getfixturevalue(kind)
    tokenizer = Tokenizer.from_metadata(
        goldens.metadata_of("plain" if kind == "sentence_pieces" else "gpt-2")
    )
    decoder = tokenizer.stream_decoder()
    output = [decoder.push(token) for token in tokenizer.encode(TEXT)]
    assert not any("\ufffd" in text for text in output)
    assert "".join(output).removeprefix(" ") + decoder.finish() == TEXT


def test_control_tokens_are_omitted_from_a_stream_unless_requested(byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(byte_pairs.metadata_of("gpt-2"))
    control = tokenizer.vocabulary.ids["<|im_end|>"]
    assert tokenizer.stream_decoder().push(control) == ""
    assert tokenizer.stream_decoder(special=True).push(control) == "<|im_end|>"
