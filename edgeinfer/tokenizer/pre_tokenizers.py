"""The byte-pair pre-tokenizers: names and the regexes that split a text into words.

Source: the `pre_tokenizer` sections of the models' tokenizer.json and llama.cpp's `llama-vocab.cpp`. If the
two differ, llama.cpp is followed, because GGUF files are made and tested with it.
"""

from dataclasses import dataclass
from typing import Literal

from edgeinfer.errors import UnsupportedModelError
from edgeinfer_quant_formats.errors import printable

Reading = Literal["classes", "classes with han", "characters"]


@dataclass(frozen=True)
class Split:
    """Split before and after every match of a regex."""

    pattern: str
    reads: Reading = "classes"
    """"classes": match class bytes of the text (see `unicode_classes`), "characters": the text itself."""


@dataclass(frozen=True)
class GroupDigits:
    """Split runs of digits into groups of three, counted from the right."""

    digit: str
    joins_text_before: bool
    """True: the first group keeps the text before it and a split follows the last. False: the reverse."""


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-pair tokenizer splits a text into words before it merges."""

    stages: tuple[Split | GroupDigits, ...]
    """Applied in order, each to the pieces of the previous stage."""
    ignore_merges: bool = False
    """A word that is a token is not merged."""
    add_bos: bool = False
    """Default of `add_bos` if the file doesn't set it."""
    byte_level: bool = True
    """Token texts are in GPT-2's alphabet of bytes; False: they are plain UTF-8."""
    escape_spaces: bool = False
    """Spaces are replaced by U+2581."""
    has_default_bos: bool = True
    always_adds_bos: bool = False
    """BOS is added whatever the file sets."""
    merges_are_optional: bool = False
    drops_whitespace: bool = False
    lowercase: bool = False
    newline_runs: bool = False
    """A run of newlines that is a token is not merged."""


# Members of the classes inside brackets: a class byte and the ASCII characters.
_N = r"\xd10-9"
_L = r"\xd2A-Za-z"
_UPPER = r"\xd2A-Z"
_LOWER = r"\xd2a-z"
_P = r"\xd3!-#%-*,-/:-;?-@\[-\]_{}"
_M = r"\xd4"
_S = r"\xd5$+<->^`|~"
_HAN = r"\xd6\xd7"
_HAN_LETTER = r"\xd6"

_ASCII_PUNCTUATION = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_SUFFIX = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_CASED_SUFFIX = r"'(?:[stmd]|re|ve|ll)"
_SPACES = r"\s+(?!\S)|\s+"
_NEWLINES_AND_SPACES = rf"\s*[\r\n]+|{_SPACES}"
_SYMBOLS_AND_SPACES = rf" ?[^\s{_L}{_N}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
_SYMBOLS_SLASH_AND_SPACES = rf" ?[^\s{_L}{_N}]+[\r\n/]*|{_NEWLINES_AND_SPACES}"
_WORD = rf"[^\r\n{_L}{_N}]?[{_L}]+"
_WORD_WITH_MARKS = rf"[^\r\n{_L}{_N}]?[{_L}{_M}]+"

_GPT2 = Split(rf"{_CASED_SUFFIX}| ?[{_L}]+| ?[{_N}]+| ?[^\s{_L}{_N}]+|{_SPACES}")
_LLAMA3 = Split(rf"{_SUFFIX}|{_WORD}|[{_N}]{{1,3}}|{_SYMBOLS_AND_SPACES}")
_QWEN2 = Split(rf"{_SUFFIX}|{_WORD}|[{_N}]|{_SYMBOLS_AND_SPACES}")
_DIGIT = Split(rf"[{_N}]")
_DIGITS = Split(rf"[{_N}]+")
_THREE_DIGITS = Split(rf"[{_N}]{{1,3}}")
_NEWLINE_RUNS = Split(r"[^\n]+|\n+")
_NEWLINE = Split(r"[\r\n]")
_THREE_ASCII_DIGITS = Split("[0-9][0-9][0-9]")
_GROUPS_WITH_TEXT_BEFORE = GroupDigits(rf"[{_N}]+", joins_text_before=True)
_WORDS_BY_CASE = rf"[^\r\n{_L}{_N}]?[{_UPPER}]*[{_LOWER}]+SUFFIX|[^\r\n{_L}{_N}]?[{_UPPER}]+[{_LOWER}]*SUFFIX"
_TEKKEN = Split(rf"{_WORDS_BY_CASE.replace('SUFFIX', '')}|[{_N}]|{_SYMBOLS_SLASH_AND_SPACES}")
_GPT4O = Split(
    rf"{_WORDS_BY_CASE.replace('SUFFIX', f'(?:{_SUFFIX})?')}|[{_N}]{{1,3}}|{_SYMBOLS_SLASH_AND_SPACES}"
)
_GRANITE_MULTI = Split(
    rf"[^\r\n{_L}{_N}]?[{_UPPER}{_M}]*[{_LOWER}{_M}]+(?:{_SUFFIX})?"
    rf"|[^\r\n{_L}{_N}]?[{_UPPER}{_M}]+[{_LOWER}{_M}]*(?:{_SUFFIX})?"
    rf"|[{_N}]{{1,3}}|{_SYMBOLS_SLASH_AND_SPACES}"
)
_WORDS_WITH_SUFFIX = Split(rf"{_WORD_WITH_MARKS}(?:{_SUFFIX})?|[{_N}]{{1,3}}|{_SYMBOLS_SLASH_AND_SPACES}")
_DEEPSEEK3_WORDS = rf"[{_ASCII_PUNCTUATION}][A-Za-z]+|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+| ?[{_P}{_S}]+"
_DEEPSEEK3 = Split(rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_NEWLINES_AND_SPACES}")
_KIMI = Split(
    rf"[{_HAN}]+|[^\r\n{_L}{_N}{_HAN}]?[{_L}]+(?:{_SUFFIX})?|[{_N}]{{1,3}}"
    rf"| ?[^\s{_L}{_N}{_HAN_LETTER}]+[\r\n]*|{_NEWLINES_AND_SPACES}",
    reads="classes with han",
)
_CHINESE_AND_KANA = Split(r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", reads="characters")
_CHINESE_AND_HANGUL = Split(r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", reads="characters")
_ASIAN_SCRIPTS = Split(
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+",
    reads="characters",
)
_YOUTU_SCRIPTS = Split(
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    reads="characters",
)
_BETWEEN_STOPS = Split(r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", reads="characters")
_CASED_LETTERS = (
    r"\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    r"\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    r"\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    r"\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    r"\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    r"\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    r"\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    r"\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CASED_WORD = Split(rf"\s?[A-Za-z{_CASED_LETTERS}]+", reads="characters")
_PUNCTUATION_RUN = Split(
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", reads="characters"
)
_JAIS2_SPACES = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4))

_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((Split(rf"[{_P}$+<=>^~|]+"), _GPT2, _DIGITS, _THREE_ASCII_DIGITS)),
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "jais-2": PreTokenizer(
        (
            Split(
                rf"{_SUFFIX}|{_WORD}|[{_N}]{{1,3}}| ?[^\s{_L}{_N}]+[\r\n]*|\s*[\r\n]+"
                rf"|{_JAIS2_SPACES}|\s{{1,2}}(?!\S)|\s"
            ),
        )
    ),
    "deepseek-llm": PreTokenizer(
        (_NEWLINE, _CASED_WORD, _PUNCTUATION_RUN, Split(r"\s+\Z"), _CHINESE_AND_HANGUL, _DIGITS)
    ),
    "deepseek-coder": PreTokenizer(
        (_NEWLINE, Split(rf"\s?[{_L}]+"), Split(rf"\s?[{_P}]+"), _CHINESE_AND_HANGUL, _DIGIT)
    ),
    "deepseek-v3": PreTokenizer((_THREE_DIGITS, _CHINESE_AND_KANA, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (_THREE_DIGITS, _CHINESE_AND_KANA, Split(rf"{_DEEPSEEK3_WORDS}|[\r\n]|{_SPACES}"), _DIGIT)
    ),
    "youtu": PreTokenizer(
        (
            _YOUTU_SCRIPTS,
            Split(rf"{_WORD_WITH_MARKS}(?:{_SUFFIX})?|[{_N}]|{_SYMBOLS_SLASH_AND_SPACES}"),
        ),
        ignore_merges=True,
    ),
    "falcon": PreTokenizer((Split(rf"[{_P}$+<=>^~|`]+"), _GPT2, _THREE_ASCII_DIGITS)),
    "starcoder": PreTokenizer((_DIGIT, _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (Split(rf"{_SUFFIX}|{_WORD_WITH_MARKS}|[{_N}]| ?[^\s{_L}{_M}{_N}]+[\r\n]*|{_NEWLINES_AND_SPACES}"),)
    ),
    "bloom": PreTokenizer((_BETWEEN_STOPS,)),
    "viking": PreTokenizer((_BETWEEN_STOPS, _DIGIT)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,), has_default_bos=False),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True, has_default_bos=False),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "chameleon": PreTokenizer(
        (
            Split("<sentinel:[0-9]+>"),
            Split("IMGIMG[A-I]{1,4}Z"),
            Split(r"[\t\n]|    |  "),
            _DIGIT,
            Split(rf"[{_P}!-/:-@\[-`{{-~]"),
            _GPT2,
        ),
        add_bos=True,
    ),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "granite-embed-multi-97m": PreTokenizer((_GRANITE_MULTI,), ignore_merges=True),
    "tiny_aya": PreTokenizer((_GROUPS_WITH_TEXT_BEFORE, _WORDS_WITH_SUFFIX)),
    "kimi-k2": PreTokenizer((_KIMI,), merges_are_optional=True),
    "superbpe": PreTokenizer((_DIGITS, GroupDigits("[0-9]+", joins_text_before=False))),
    "bailingmoe": PreTokenizer(
        (Split(rf"{_SUFFIX}|{_WORD}|[{_N}]| ?[^\s{_L}{_N}]+[\r\n]*|\s*[\r\n]|{_SPACES}"),)
    ),
    "seed-coder": PreTokenizer(
        (Split(rf"{_SUFFIX}|{_WORD}|[{_N}]| ?[^\s{_L}{_N}\r\n]+|{_NEWLINES_AND_SPACES}"),)
    ),
    "ufakzeka": PreTokenizer((Split(rf"{_WORD}|[{_N}]|{_SYMBOLS_AND_SPACES}"),)),
    "afmoe": PreTokenizer((_GROUPS_WITH_TEXT_BEFORE, _ASIAN_SCRIPTS, _DEEPSEEK3)),
    "laguna": PreTokenizer((_NEWLINE_RUNS, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            Split(
                rf"{_SUFFIX}|[^\r\n{_L}{_N}]?[{_L}][{_M}]*(?: ?[{_L}][{_M}]*)*|[{_N}]"
                rf"| ?[^\s{_L}{_N}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
            ),
        )
    ),
    "gemma4": PreTokenizer(
        (_NEWLINE_RUNS,), byte_level=False, escape_spaces=True, newline_runs=True, always_adds_bos=True
    ),
    "sarvam-moe": PreTokenizer((_NEWLINE_RUNS,), byte_level=False, escape_spaces=True),
    "minicpm5": PreTokenizer(
        (_THREE_DIGITS, Split(rf"{_SUFFIX}|{_WORD}|[{_N}]+|{_SYMBOLS_AND_SPACES}")), ignore_merges=True
    ),
}

_ALIASES: dict[str, str] = {
    alias: family
    for family, aliases in {
        "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        "dbrx": "smaug-bpe",
        "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
        "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
        "gpt-2": "phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo "
        "jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe",
        "qwen2": "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2",
        "bloom": "poro-chat gpt3-finnish",
        "glm4": "glm5",
        "gpt-4o": "llama4 kanana2 talkie minimax-m2",
        "tiny_aya": "cohere2moe",
        "bailingmoe": "bailingmoe2 llada-moe",
        "gemma4": "granite-embed-multi-311m",
    }.items()
    for alias in aliases.split()
}

WHITESPACE = PreTokenizer((Split(r"\S+"),), byte_level=False, drops_whitespace=True)
"""Of `tokenizer.ggml.model` = "whitespace" (jina-embeddings-v2-base-zh), whatever pre-tokenizer it names."""


def known_pre_tokenizers() -> list[str]:
    """Return every name that `pre_tokenizer` accepts, families and aliases, sorted."""
    return sorted(_FAMILIES | _ALIASES)


def families() -> list[str]:
    """Return one name for each pre-tokenizer, sorted."""
    return sorted(_FAMILIES)


def is_known(name: str) -> bool:
    """Return whether `pre_tokenizer` accepts a name."""
    return name in _FAMILIES or name in _ALIASES


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer that a file names in `tokenizer.ggml.pre`.

    Raises:
        UnsupportedModelError: the name is not known; the text says how to continue without it.
    """
    family = _FAMILIES.get(_ALIASES.get(name, name))
    if family is None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre: pre-tokenizer {printable(name)!r} is not known; wanted one of "
            f"{', '.join(known_pre_tokenizers())}. To use another one, give "
            "assume_pre_tokenizer='default'"
        )
    return family
