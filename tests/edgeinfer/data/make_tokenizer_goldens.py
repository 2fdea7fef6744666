"""Writes tokenizer/*.json: small vocabularies and llama.cpp's ids of odd texts.

Run by hand where llama-cpp-python is installed, with the folders of the five parts on the path:

    python make_tokenizer_goldens.py TEXT_FILE

The vocabularies are learned from the words of TEXT_FILE mixed with other scripts, across every boundary
of a pre-tokenizer, so that a boundary in the wrong place changes the ids.
"""

# ruff: noqa: RUF001 - odd texts are the point
import ctypes
import json
import random
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgeinfer.tokenizer import known_pre_tokenizers
from edgeinfer.tokenizer.encoders.byte_pair import CHARACTER_OF_BYTE, to_byte_alphabet
from edgeinfer_quant_formats import GGUFWriter
from tests.edgeinfer.data.encoder_vocabularies import (
    plamo_vocabulary,
    unigram_vocabulary,
    word_piece_vocabulary,
)
from tests.edgeinfer.tokenizer.charsmap_writer import charsmap

FOLDER = Path(__file__).parent / "tokenizer"
MERGES = 900
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SHAPE = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
ODD_PIECES = [
    *("I'm you're HE'LL it'S we'Ve 'd can'ts d'été '", "x = 3.14159; y += 1e-10", "2024-01-15 12:30:45"),
    *("1 12 123 1234 12345 123456 1234567", "٠١٢٣٤ १२३४ Ⅷ½²", "a1b22c333d4444 007abc12345xyz"),
    *(
        "   leading",
        "trailing   ",
        " a  b   c    d",
        "\t\ttabs\t",
        "line\nline\n\nline\n\n\n",
        "dos\r\ndos\r\n \r\n",
    ),
    *(" \n \n x", "a\u00a0b\u2003c\u3000d\u2028e\u0085f", "zero\u200bwidth\ufeff \u200d", "…“quotes”—‘dash’"),
    *(
        "!!!???...,,,",
        "(foo)[bar]{baz}<qux>",
        "a/b//c/\n/d\r",
        "#include <x.h>\n\tint* p = &q; // c",
        "$5+€3=£8~`^|",
    ),
    *("Führer äöü ÀÉÎ straße", "Привет, МИР и мир", "Ωμέγα ΑΒΓ", "ǅ ǈ ʰˀªº ſ İı", "𝔘𝟘 𐐀𐐨 𞤀"),
    *(
        "中文字符，測試。漢字",
        "日本語のカタカナー、ひらがな。",
        "한국어 가나다 ㄱㄴ",
        "中1文2 abc中文def",
        "〇一二三 々",
    ),
    *("हिन्दी क्षत्रिय।", "ไทยกำลังนั้น", "عربي، نص۔", "שלום", "e\u0301 a\u0308\u0301 \u0301x", "ខ្មែរ ລາວ မြန်မာ"),
    *(
        "😀👨\u200d👩\u200d👧 🏽🇩🇪✅",
        "\x00\x01\x1c\x7f",
        "\U0002a6df\U0002f800豈\ufa6e",
        "\u0378\ue000\U0010ffff",
    ),
    *(
        "CamelCaseWORDSandMore iPhone's",
        "HTMLParser2XML'S",
        "snake_case_name __init__",
        "https://x.y/z?a=1&b=%20",
    ),
    *(
        "<|im_start|>user\nHi<|im_end|>\n<s></s>",
        "<ud>a<ud> b <ud>",
        "<|ctl|> x<|ctl|>",
        "IMGIMGABCZ <sentinel:12>",
    ),
    *(
        "▁already▁there▁▁",
        "a b c d e f g",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "",
        " ",
        "  ",
        "\n",
        "'",
        "e",
    ),
    *(
        "................................",
        "===== -----",
        "1,234,567.89",
        "v1.2.3-rc4+56",
        "A.B.C. Mr. O'Neil's",
    ),
]


def learned_merges(symbols: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return the `count` most frequent merges, each after the ones before it."""
    merges = []
    for _ in range(count):
        pairs = Counter(pair for line in symbols for pair in pairwise(line))
        (left, right), _ = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        merges.append((left, right))
        for line in symbols:
            index = 0
            while index < len(line) - 1:
                if line[index] == left and line[index + 1] == right:
                    line[index : index + 2] = [left + right]
                index += 1
    return merges


def corpus(path: str) -> list[str]:
    rng = random.Random(5)
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if len(line) > 40]
    texts = [line[:160] for line in rng.sample(lines, 260)]
    for piece in (piece for piece in ODD_PIECES if not {"<", "\0"} & set(piece)):
        for _ in range(12):
            at = rng.randrange(len(piece) + 1)
            texts.append(piece[at : at + 9] + rng.choice(["", " ", "\n", "1", "'s", "中", " a", "  "]))
    return texts


def byte_pair_vocabulary(texts: list[str]) -> dict[str, Any]:
    merges = learned_merges([list(to_byte_alphabet(text)) for text in texts], MERGES)
    alphabet = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<ud>", "<|ctl|>"]
    joined = dict.fromkeys(left + right for left, right in merges)
    tokens = [*alphabet, *joined, *special]
    types = [NORMAL] * (len(tokens) - 5) + [CONTROL, CONTROL, CONTROL, USER_DEFINED, CONTROL]
    return {
        **SHAPE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": len(tokens) - 5,
        "tokenizer.ggml.eos_token_id": len(tokens) - 5,
    }


def raw_byte_pair_vocabulary(texts: list[str]) -> dict[str, Any]:
    """Byte pairs over UTF-8 with `▁` for a space and a token for each byte, as Gemma 4 has them."""
    lines = [line.replace(" ", "▁") for text in texts for line in text.split("\n") if line]
    merges = [("\n", "\n"), *learned_merges([list(line) for line in lines], MERGES // 2)]
    common = [character for character, count in Counter("".join(lines)).most_common() if count > 5]
    joined = dict.fromkeys(left + right for left, right in merges)
    tokens = [*dict.fromkeys(["<pad>", "<eos>", "<bos>", "<ud>", *BYTE_TOKENS, "\n", *common, *joined])]
    types = [CONTROL, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260)]
    return {
        **SHAPE,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentence_piece_vocabulary(texts: list[str]) -> dict[str, Any]:
    """Pieces with falling scores, some equal, some across a space."""
    lines = [text.replace(" ", "▁") for text in texts]
    merges = learned_merges([list(line) for line in lines], MERGES)
    common = [character for character, count in Counter("".join(lines)).most_common() if count > 8]
    pieces = list(dict.fromkeys([left + right for left, right in merges] + common))
    special = ["<unk>", "<s>", "</s>", "<ud>", "<|ctl|>", "<|endoftext|>"]
    tokens = [*special, *BYTE_TOKENS, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, CONTROL, CONTROL, *[BYTE] * 256]
    return {
        **SHAPE,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [*[0.0] * 262, *[-float(index // 3) for index in range(len(pieces))]],
    }


def llama_cpp_ids(metadata: dict[str, Any], texts: list[str]) -> list[list[int]]:
    """Return llama.cpp's ids of each text, plain and then with special tokens, BOS and EOS."""
    import llama_cpp

    path = Path(tempfile.mkdtemp()) / "vocabulary.gguf"
    key = "tokenizer.ggml.precompiled_charsmap"
    if key in metadata:
        metadata = metadata | {key: charsmap(metadata[key])}
    GGUFWriter(path, metadata).write()
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    result = []
    for special in (False, True):
        for text in texts:
            data = text.encode()
            room = (llama_cpp.llama_token * (len(data) + 16))()
            count = llama_cpp.llama_tokenize(
                vocabulary, data, len(data), room, len(data) + 16, special, special
            )
            result.append(list(room[:count]))
    llama_cpp.llama_model_free(model)
    return result


def write(name: str, metadata: dict[str, Any], variants: dict[str, dict[str, Any]]) -> None:
    """Write a vocabulary and the ids for each variant of its metadata, equal ones once."""
    distinct: list[list[list[int]]] = [[] for _ in range(2 * len(ODD_PIECES))]
    selected: dict[str, list[int]] = {}
    for variant, changes in variants.items():
        selected[variant] = []
        for known, ids in zip(distinct, llama_cpp_ids(metadata | changes, ODD_PIECES), strict=True):
            if ids not in known:
                known.append(ids)
            selected[variant].append(known.index(ids))
    content = {
        "metadata": metadata,
        "texts": ODD_PIECES,
        "variants": {variant: [changes, selected[variant]] for variant, changes in variants.items()},
        "ids": distinct,
    }
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    import llama_cpp

    no_log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(no_log, ctypes.c_void_p(0))
    texts = corpus(sys.argv[1])
    names = {name: {"tokenizer.ggml.pre": name} for name in known_pre_tokenizers()}
    write("byte_pair", byte_pair_vocabulary(texts), names)
    whitespace = {"tokenizer.ggml.model": "whitespace", "tokenizer.ggml.pre": "whitespace"}
    raw: dict[str, dict[str, Any]] = {
        "gemma4": {},
        "whitespace": whitespace,
        "lowercase": whitespace | {"tokenizer.ggml.normalizer.lowercase": True},
    }
    write("raw_byte_pair", raw_byte_pair_vocabulary(texts), raw)
    prefix, both = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_eos_token"
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "no space prefix": {prefix: False},
        "eos": {both: True},
    }
    variants["phi-3"] = {"general.name": "Phi-3 test"}
    write("sentence_piece", sentence_piece_vocabulary(texts), variants)
    write_encoders(texts)


def write_encoders(texts: list[str]) -> None:
    prefix, merged = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"
    lowercase, accents = (f"tokenizer.ggml.normalizer.{key}" for key in ("lowercase", "strip_accents"))
    words: dict[str, dict[str, Any]] = {
        "uncased": {},
        "cased": {lowercase: False},
        "accents": {accents: False},
        "cased without accents": {lowercase: False, accents: True},
    }
    write("word_piece", SHAPE | word_piece_vocabulary(texts, learned_merges), words)
    spaces: dict[str, dict[str, Any]] = {
        "xlm-r": {},
        "all spaces": {merged: False},
        "no space prefix": {merged: False, prefix: False},
        "merged spaces": {prefix: False},
        "no eos": {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_bos_token": False},
    }
    write("unigram", SHAPE | unigram_vocabulary(texts, learned_merges), spaces)
    write("plamo", SHAPE | plamo_vocabulary(texts, learned_merges), {"plain": {}})


if __name__ == "__main__":
    main()
