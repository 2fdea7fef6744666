"""RWKV's tokenizer: the longest token that the text continues with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.tokenizer import Tokenizer
from edgeinfer_quant_formats import GGUFWriter
from tests.model_zoo import ZOO

WORDS = ["the", "th", "then", " the", "  ", "é", "日本", "\n\n", "\\'", "ab", "abcd"]
TEXTS = [
    *("", "then there", "the  the\n\n\n", "abc abcd abcde", "é日本 本", "a\\b'c\td\r", "\x00\x7f"),
    "0123 <s> </s>",
]


def tokens() -> list[str]:
    """The control token, all bytes, and some words, escaped as llama.cpp's converter does."""
    words = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
    return ["<s>", *(repr(word)[2:-1] for word in words)]


def metadata() -> dict[str, Any]:
    texts = tokens()
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([3] + [1] * (len(texts) - 1), np.int32),
        "tokenizer.ggml.eot_token_id": 0,
    }


def test_longest_token_is_taken_and_bytes_come_back() -> None:
    tokenizer = Tokenizer.from_metadata(metadata())
    texts = [b"", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]
    assert [texts[i] for i in tokenizer.encode("then abcd\n")] == [b"then", b" ", b"abcd", b"\n"]
    assert [texts[i] for i in tokenizer.encode("abc")] == [b"ab", b"c"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_control_token_is_read_only_as_such() -> None:
    tokenizer = Tokenizer.from_metadata(metadata())
    assert tokenizer.encode("a<s>", special=True)[-1] == 0
    assert 0 not in tokenizer.encode("a<s>")


@pytest.mark.llama_cpp
def test_tokens_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    own = metadata()
    path = tmp_path / "model.gguf"
    model = ZOO["rwkv7"]
    others = {key: value for key, value in model.metadata().items() if not key.startswith("tokenizer.")}
    with GGUFWriter(path, {**others, **own}) as writer:
        writer.add_tensor("token_embd.weight", np.zeros((len(tokens()), 128), np.float32), "F32")
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = Tokenizer.from_metadata(own)
    for text in TEXTS[:-1]:
        assert tokenizer.encode(text) == llama.tokenize(text.encode(), add_bos=False, special=False), text
    llama.close()
