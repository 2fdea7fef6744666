"""Tokenizers of encoder models (WordPiece, unigram) and of PLaMo 2: llama.cpp's ids, text, damaged files."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.tokenizer import Tokenizer
from edgeinfer.tokenizer.encoders.charsmap import MAX_KEY_BYTES, MAX_REPLACEMENT_BYTES, MAX_UNITS, Charsmap
from edgeinfer.tokenizer.encoders.piece_table import MAX_PIECE_LENGTH
from edgeinfer.tokenizer.tokenizer import KINDS
from edgeinfer_quant_formats import GGUFWriter
from edgeinfer_quant_formats.errors import FormatError
from tests.edgeinfer.data.encoder_vocabularies import REPLACEMENTS
from tests.edgeinfer.tokenizer.charsmap_writer import charsmap, double_array, packed
from tests.edgeinfer.tokenizer.test_goldens import differing

VARIANTS = {
    "word_pieces": ["uncased", "cased", "accents", "cased without accents"],
    "unigrams": ["xlm-r", "all spaces", "no space prefix", "merged spaces", "no eos"],
    "plamo_pieces": ["plain"],
}
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"


@pytest.mark.parametrize(
    ("kind", "variant"), [(kind, variant) for kind, variants in VARIANTS.items() for variant in variants]
)
def test_ids_equal_those_of_llama_cpp(kind: str, variant: str, request: pytest.FixtureRequest) -> None:
    goldens = request.getfixturevalue(kind)
    assert variant in goldens.variants
    assert differing(goldens, variant, Tokenizer.from_metadata(goldens.metadata_of(variant))) == []


def with_streaming(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream_decoder()
    return "".join(decoder.push(token) for token in ids) + decoder.finish()


@pytest.fixture
def words(word_pieces: Any) -> Tokenizer:
    return Tokenizer.from_metadata(word_pieces.metadata)


@pytest.fixture
def unigram(unigrams: Any) -> Tokenizer:
    return Tokenizer.from_metadata(unigrams.metadata)


@pytest.fixture
def plamo(plamo_pieces: Any) -> Tokenizer:
    return Tokenizer.from_metadata(plamo_pieces.metadata)


def test_word_pieces_decode_to_normalized_words(words: Tokenizer) -> None:
    ids = words.encode("The  QUEEN, théy\tsaid!", bos=True)
    assert words.decode(ids) == "the queen , they said !"
    assert words.decode(ids, special=True) == "[CLS]the queen , they said ![SEP]"
    assert with_streaming(words, ids) == " the queen , they said !"


def test_a_word_without_pieces_is_one_unknown_token(words: Tokenizer) -> None:
    assert words.unk_id is not None
    (the,) = words.encode("the")
    assert words.encode("the \U0001f9ff\U0001f9fe the") == [the, words.unk_id, the]
    assert words.encode("\u200b\x01 \ufffd") == []


def test_control_tokens_need_to_be_requested(words: Tokenizer, unigram: Tokenizer, plamo: Tokenizer) -> None:
    for tokenizer, names in (
        (words, ("[CLS]", "[SEP]", "[MASK]", "[UNK]", "control", "▁control")),
        (unigram, ("<s>", "</s>", "<pad>", "<unk>", "<0x41>")),
        (plamo, ("<|plamo:eos|>", "<|plamo:bos|>", "<0x41>")),
    ):
        for name in names:
            ids = [token for token in tokenizer.encode(f"a{name}{name} {name}") if token != tokenizer.unk_id]
            assert not any(tokenizer.is_control(token) for token in ids), name
    assert words.encode("[MASK]", special=True) == [words.vocabulary.special.mask]
    assert unigram.encode("</s>", special=True) == [unigram.eos_id]


def test_a_user_defined_token_is_always_parsed(words: Tokenizer, unigram: Tokenizer) -> None:
    for tokenizer in (words, unigram):
        assert tokenizer.vocabulary.ids["<ud>"] in tokenizer.encode("the<ud>the")


def test_unigrams_merge_spaces_and_unknown_characters(unigrams: Any, unigram: Tokenizer) -> None:
    assert unigram.decode(unigram.encode("  the   king \t said  ", bos=True)) == "the king said"
    assert unigram.encode("\U0001f9ff\U0001f9fe").count(unigram.unk_id or 0) == 1
    keeps = Tokenizer.from_metadata(unigrams.metadata_of("all spaces"))
    assert keeps.decode(keeps.encode("  the   king ")) == "  the   king "
    assert with_streaming(keeps, keeps.encode("the king")) == " the king"


def test_unigrams_take_the_best_split_of_all() -> None:
    rng = random.Random(3)
    pieces = sorted({"".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(40)} | {"a", "b", "c"})
    scores = [round(rng.uniform(-9, -1), 2) for _ in pieces]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", *pieces],
            "tokenizer.ggml.token_type": [3, 3, 2] + [1] * len(pieces),
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *scores],
        }
    )
    by_piece = dict(zip(pieces, scores, strict=True))

    def best(text: str) -> float:
        splits = (
            by_piece[text[:end]] + best(text[end:])
            for end in range(1, len(text) + 1)
            if text[:end] in by_piece
        )
        return max(splits, default=-math.inf) if text else 0.0

    for _ in range(40):
        text = "".join(rng.choices("abc", k=8))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert sum(scores[token - 3] for token in ids) == pytest.approx(best(text), abs=1e-4)


def test_plamo_round_trips_text(plamo: Tokenizer, plamo_pieces: Any) -> None:
    for text in plamo_pieces.texts:
        assert plamo.decode(plamo.encode(text)) == text
        assert with_streaming(plamo, plamo.encode(text)) == text


def test_byte_pairs_without_whitespace_drop_it(raw_byte_pairs: Any) -> None:
    tokenizer = Tokenizer.from_metadata(raw_byte_pairs.metadata_of("whitespace"))
    assert tokenizer.kind == "byte pairs without whitespace"
    assert tokenizer.decode(tokenizer.encode(" The\u3000king\n中文 é ")) == "Theking中文é"
    lower = Tokenizer.from_metadata(raw_byte_pairs.metadata_of("lowercase"))
    assert lower.decode(lower.encode("The ÉCOLE")) == "theécole"


def test_replacements_take_the_longest_key() -> None:
    table = Charsmap({CHARSMAP: charsmap(REPLACEMENTS)})
    for key, replacement in REPLACEMENTS.items():
        assert table.apply(f"x{key}y{key}") == f"x{replacement}y{replacement}"
    assert table.apply("e\u0301 a\u0308\u0301 a\u0308b a e") == "é a\u0301 äb a e"
    assert Charsmap({}).apply("e\u0301") == "e\u0301"
    assert Charsmap({CHARSMAP: np.array([], np.uint8)}).apply("Ⅷ") == "Ⅷ"


def long_key() -> Any:
    return charsmap({"a" * (MAX_KEY_BYTES + 1): "b"})


def cycle() -> Any:
    """Nodes 256 and 512 have each other as children, by the byte `a`."""
    units = np.zeros(1024, np.uint32)
    units[0] = 256 << 10
    units[256 ^ 97] = 97 | (256 ^ 97 ^ 512) << 10
    units[512 ^ 97] = 97 | (512 ^ 97 ^ 256) << 10
    return packed(units, b"x\0")


def far_node() -> Any:
    units = double_array({97: {0: 0}})
    units[(units[0] >> 10) ^ 97] |= 1 << 30
    return packed(units, b"x\0")


DAMAGE: list[tuple[str, Callable[[], Any], str]] = [
    ("short", lambda: np.array([1, 2, 3], np.uint8), "3 bytes with a double array"),
    (
        "no replacements",
        lambda: packed(np.zeros(256, np.uint32), b""),
        "1028 bytes with a double array of 1024",
    ),
    ("size beyond", lambda: np.array([255] * 40, np.uint8), "40 bytes with a double array of 4294967295"),
    ("floats", lambda: np.zeros(9, np.float32), "9 values of type float32; wanted bytes"),
    ("a text", lambda: "abc", "1 values of type <U3; wanted bytes"),
    ("long key", long_key, f"keys of more than {MAX_KEY_BYTES} bytes, or a cycle"),
    ("cycle", cycle, "or a cycle in its double array"),
    ("far node", far_node, "a node beyond the 256 units"),
    ("many units", lambda: packed(np.zeros(MAX_UNITS + 1, np.uint32), b"\0"), f"at most {MAX_UNITS} units"),
    ("open replacement", lambda: packed(double_array({97: {0: 0}}), b"xy"), "at byte 0 of 2 has no end"),
    ("far replacement", lambda: packed(double_array({97: {0: 9}}), b"x\0"), "at byte 9 of 2 has no end"),
    ("long replacement", lambda: charsmap({"a": "b" * (MAX_REPLACEMENT_BYTES + 1)}), "has no end within"),
    ("not UTF-8", lambda: packed(double_array({97: {0: 0}}), b"\xff\xfe\0"), "ff fe is not UTF-8"),
]


@pytest.mark.parametrize(
    ("damaged", "message"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE]
)
def test_a_damaged_charsmap_is_an_error_of_one_line(
    damaged: Callable[[], Any], message: str, unigrams: Any
) -> None:
    with pytest.raises(FormatError, match=message) as error:
        Tokenizer.from_metadata(unigrams.metadata | {CHARSMAP: damaged()})
    assert "\n" not in str(error.value)


def test_random_bytes_in_a_charsmap_never_crash() -> None:
    rng = np.random.default_rng(5)
    sound = charsmap(REPLACEMENTS)
    results = []
    for _ in range(300):
        data = sound.copy()
        data[4 + rng.integers(0, len(data) - 4, 12)] = rng.integers(0, 256, 12)
        try:
            table = Charsmap({CHARSMAP: data})
        except FormatError:
            results.append(False)
        else:
            results.append(isinstance(table.apply("e\u0301Ⅷ a\u0308\u0301\u3000…ガ\x00\U0001d518" * 3), str))
    assert True in results
    assert False in results


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["unigrams", "plamo_pieces"])
def test_a_score_that_is_not_finite_is_an_error(
    kind: str, score: float, request: pytest.FixtureRequest
) -> None:
    metadata = request.getfixturevalue(kind).metadata
    scores = metadata["tokenizer.ggml.scores"].copy()
    scores[300] = score
    with pytest.raises(FormatError, match=r"scores: token 300 has the score .*, wanted a finite number"):
        Tokenizer.from_metadata(metadata | {"tokenizer.ggml.scores": scores})


@pytest.mark.parametrize("kind", VARIANTS)
def test_extreme_scores_and_wrong_ids_give_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    metadata = request.getfixturevalue(kind).metadata
    count = len(metadata["tokenizer.ggml.tokens"])
    roles = ("bos", "eos", "unknown", "seperator", "padding", "mask")
    odd = {f"tokenizer.ggml.{role}_token_id": 2**31 for role in roles}
    for score in (3e38, -3e38, 0.0):
        scores = np.full(count, score, np.float32)
        tokenizer = Tokenizer.from_metadata(metadata | odd | {"tokenizer.ggml.scores": scores})
        ids = tokenizer.encode("the king \U0001f9ff said", bos=True)
        assert ids
        assert all(0 <= token < count for token in ids)
    lone = {"tokenizer.ggml.model": metadata["tokenizer.ggml.model"], "tokenizer.ggml.tokens": ["a"]}
    if kind != "plamo_pieces":
        assert Tokenizer.from_metadata(lone | odd).encode("ab a", bos=True) in ([], [0], [0, 0])


def test_a_long_piece_is_an_error(word_pieces: Any) -> None:
    tokens = [*word_pieces.metadata["tokenizer.ggml.tokens"]]
    tokens[100] = "a" * (MAX_PIECE_LENGTH + 1)
    with pytest.raises(FormatError, match=f"token 100 has {MAX_PIECE_LENGTH + 1} characters, wanted at most"):
        Tokenizer.from_metadata(word_pieces.metadata | {"tokenizer.ggml.tokens": tokens})


def test_plamo_without_a_byte_is_an_error(plamo_pieces: Any) -> None:
    tokens = [*plamo_pieces.metadata["tokenizer.ggml.tokens"]]
    tokens[tokens.index("<0x07>")] = "<0x08>"
    with pytest.raises(FormatError, match="no token <0x07> of type BYTE, wanted all 256"):
        Tokenizer.from_metadata(plamo_pieces.metadata | {"tokenizer.ggml.tokens": tokens})


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_long_text_is_encoded_in_linear_time(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.from_metadata(request.getfixturevalue(kind).metadata)
    for character in ("a", " ", "\n", "7", "中", "\U0001f9ff", "e\u0301", "▁"):
        ids = tokenizer.encode(character * 30_000)
        assert tokenizer.encode(character * 30_000) == ids


def test_a_vocabulary_file_opens_and_names_its_kind(tmp_path: Path, word_pieces: Any) -> None:
    path = tmp_path / "vocabulary.gguf"
    GGUFWriter(path, word_pieces.metadata).write()
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.kind == KINDS["bert"] == "WordPiece"
    assert tokenizer.encode("the") == Tokenizer.from_metadata(word_pieces.metadata).encode("the")
