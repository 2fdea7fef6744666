"""Splitting a text into words."""

import random

import numpy as np
import pytest

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.tokenizer import Tokenizer, known_pre_tokenizers
from edgeinfer.tokenizer.pre_tokenizers import pre_tokenizer
from edgeinfer.tokenizer.splitting import Splitter
from edgeinfer.tokenizer.unicode_classes import LETTER, MARK, NUMBER, OTHER, class_table, class_text

METADATA = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}


def words(name: str, text: str) -> list[str]:
    return list(Splitter(pre_tokenizer(name)).words(text))


def test_an_unknown_pre_tokenizer_is_named_with_the_option_to_set() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        Tokenizer.from_metadata(METADATA | {"tokenizer.ggml.pre": "tomorrow-bpe"})
    assert "'tomorrow-bpe' is not known" in str(caught.value)
    assert "assume_pre_tokenizer='default'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replacing_an_unknown_pre_tokenizer_gives_a_warning() -> None:
    metadata = METADATA | {"tokenizer.ggml.pre": "tomorrow-bpe"}
    tokenizer = Tokenizer.from_metadata(metadata, unknown_pre="default")
    assert "'tomorrow-bpe' is not known: 'default' is taken instead" in tokenizer.warnings[0]


def test_a_replacement_is_not_used_for_a_known_pre_tokenizer() -> None:
    assert (
        Tokenizer.from_metadata(METADATA | {"tokenizer.ggml.pre": "qwen2"}, unknown_pre="gpt-2").warnings
        == ()
    )


def test_an_unknown_replacement_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match="'other' is not known"):
        Tokenizer.from_metadata(METADATA | {"tokenizer.ggml.pre": "tomorrow-bpe"}, unknown_pre="other")


HYBRID_FAMILIES = {
    "qwen35": "qwen35",  # Qwen3.5, 3.6 and 3.8
    "qwen2": "qwen2",  # Qwen3-Next
    "lfm2": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "tekken": "tekken",  # Nemotron-H, Nemotron 3, Jamba 1.6
    "pixtral": "llama-bpe",
    "dbrx": "dbrx",  # Granite 4
    "refact": "starcoder",  # Granite, earlier conversions
    "granite-docling": "gpt-2",
    "mpt": "gpt-2",  # Mamba and Mamba 2 with the vocabulary of GPT-NeoX
    "olmo": "gpt-2",
    "gpt-2": "gpt-2",
}


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_the_pre_tokenizers_of_hybrid_models_are_known(name: str) -> None:
    assert pre_tokenizer(name) == pre_tokenizer(HYBRID_FAMILIES[name])


def test_marks_belong_to_the_word_in_qwen35_and_not_in_qwen2() -> None:
    text = "re\u0301sume\u0301 Vie\u0302\u0301t a\u0300a\u0300 12"
    assert words("qwen35", text) == [
        "re\u0301sume\u0301",
        " Vie\u0302\u0301t",
        " a\u0300a\u0300",
        " ",
        "1",
        "2",
    ]
    assert words("qwen2", text)[:3] == ["re", "\u0301sume", "\u0301"]


def test_a_missing_pre_tokenizer_gives_a_warning() -> None:
    assert "tokenizer.ggml.pre is missing" in Tokenizer.from_metadata(METADATA).warnings[0]


@pytest.mark.default_cases(30)
@pytest.mark.parametrize("name", known_pre_tokenizers())
def test_words_of_random_text_join_to_the_text(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        alphabet = rng.choice(["ab 1'\n", "aA\u0301中0٣ \u3000\r\n!", "".join(map(chr, range(32, 0x2FF, 7)))])
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(60)))
        assert "".join(words(name, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'll  go 123!", ["I", "'ll", " ", " go", " 123", "!"]),
        ("llama-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("qwen2", "a12 b\n\n c", ["a", "1", "2", " b", "\n\n", " c"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("deepseek-v3", "中文abc1234", ["中文", "abc", "123", "4"]),
        ("kimi-k2", "漢字abc's", ["漢字", "abc's"]),
        ("gpt-4o", "HTMLParser's/\n", ["HTMLParser's", "/\n"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("tiny_aya", "a1234567b", ["a", "1", "234", "567", "b"]),
        ("superbpe", "a1234567b", ["a", "1", "234", "567", "b"]),
        ("falcon", "12345 a`b", ["123", "45", " a", "`", "b"]),
        ("bloom", "ab, cd。ef", ["ab", ",", " cd", "。", "ef"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words_are_split_as_in_training(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def test_classes_beyond_ascii_are_single_bytes() -> None:
    table = class_table()
    assert table.shape == (0x110000,)
    result = class_text("aé1٣ \u3000\u0301\u0378", table).encode("latin-1")
    assert result == bytes([ord("a"), LETTER, ord("1"), NUMBER, ord(" "), 0x0B, MARK, OTHER])
    assert np.array_equal(table[:128], np.arange(128))
