"""Small vocabularies of encoder models for make_tokenizer_goldens.py: WordPiece, unigram and PLaMo 2."""

# ruff: noqa: RUF001 - odd texts are the point
from collections import Counter
from collections.abc import Callable
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
MERGES = 500
_SPACES = dict.fromkeys("\t\n\r\u00a0\u3000\u2003", " ") | dict.fromkeys("\u200b\u00ad\x01\x1c", "")
_ACCENTS = {"e\u0301": "é", "a\u0308": "ä", "a\u0308\u0301": "a\u0301", "ä\u0301": "a\u0301"}
_COMPATIBLE = {"²": "2", "½": "1⁄2", "Ⅷ": "VIII", "ǅ": "Dž", "…": "...", "𝔘": "U", "𝟘": "0"}
REPLACEMENTS = _SPACES | _ACCENTS | _COMPATIBLE | {"\uf900": "\u8c48", "カ\u3099": "ガ"}
"""A part of what the normalization form NFKC does."""
Learned = Callable[[list[list[str]], int], list[tuple[str, str]]]


def pieces_of(lines: list[str], learned: Learned) -> list[str]:
    """Return the most frequent pieces of lines, longer ones first, then their characters."""
    merges = learned([list(line) for line in lines], MERGES)
    common = [character for character, count in Counter("".join(lines)).most_common() if count > 8]
    return list(dict.fromkeys([left + right for left, right in merges] + common))


def word_piece_vocabulary(texts: list[str], learned: Learned) -> dict[str, Any]:
    """Pieces with `▁` at the beginning of words; roles at other ids than llama.cpp's defaults."""
    words = [f"▁{word}" for text in texts for word in (text.lower() if len(text) % 2 else text).split()]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<ud>", "control"]
    tokens = [*special, *pieces_of(words, learned)]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "bert-bge",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 5 + [USER_DEFINED, CONTROL] + [NORMAL] * (len(tokens) - 7),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def unigram_vocabulary(texts: list[str], learned: Learned) -> dict[str, Any]:
    """Pieces with falling scores, some equal, one user-defined and one unused among them."""
    pieces = pieces_of([text.replace(" ", "▁") for text in texts], learned)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<ud>", "▁unused"]
    tokens = [*special, *BYTE_TOKENS, *pieces]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, USER_DEFINED, UNUSED, *[BYTE] * 256]
    scores = [-3.5 - 0.25 * (index // 3) ** 0.5 for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [*[0.0] * 262, *[round(score, 3) for score in scores]],
        "tokenizer.ggml.precompiled_charsmap": REPLACEMENTS,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def plamo_vocabulary(texts: list[str], learned: Learned) -> dict[str, Any]:
    """Pieces with falling scores and a token for each byte."""
    pieces = pieces_of(texts, learned)
    special = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]
    tokens = list(dict.fromkeys([*special, *BYTE_TOKENS, *pieces]))
    scores = [-(3.0 + index // 3 * 0.01) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "plamo2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [*[0.0] * 260, *[round(score, 2) for score in scores]],
    }
