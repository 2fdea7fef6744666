"""The names in `tokenizer.ggml.pre` of the pre-tokenizers of tokenizer.json, found by their regexes."""

import json
from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import shown

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+S|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*S"
_LLAMA3 = rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_QWEN35 = (
    rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_CASED.replace('S', '')}|\p{{N}}|{_SLASHES}|{_SPACES}"
_GPT4O = rf"{_CASED.replace('S', _SUFFIX + '?')}|\p{{N}}{{1,3}}|{_SLASHES}|{_SPACES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BYTES, _GPT2 = "bytes", "bytes by GPT-2's regex"

_NAMES: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    ("digits", _GPT2): "starcoder",
    (_QWEN2, _BYTES): "qwen2",
    (_QWEN35, _BYTES): "qwen35",
    (_TEKKEN, _BYTES): "tekken",
    (_GPT4O, _BYTES): "gpt-4o",
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3, _BYTES): "deepseek-v3",
    (" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+", _BYTES): "bloom",
    ("punctuation", _GPT2, "runs of digits", "[0-9][0-9][0-9]"): "falcon",
}


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """The name of a byte-level tokenizer's pre-tokenizer; None: it isn't known."""
    stages = tuple(_stages(tokenizer.get("pre_tokenizer")))
    if stages == (_LLAMA3, _BYTES):
        merges_words = not tokenizer.get("model", {}).get("ignore_merges", False)
        return "dbrx" if merges_words else "llama-bpe"
    return _NAMES.get(stages)


def described(tokenizer: Mapping[str, Any]) -> str:
    """The pre-tokenizer for a message."""
    return shown(json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=True), 200)


def _stages(given: Any) -> list[str]:
    """What a pre-tokenizer does, in order; regexes as they are."""
    if not isinstance(given, Mapping):
        return []
    kind = given.get("type")
    if kind == "Sequence":
        return [stage for each in given.get("pretokenizers") or () for stage in _stages(each)]
    if kind == "ByteLevel":
        if given.get("add_prefix_space"):
            return ["bytes with a space before"]
        return [_GPT2 if given.get("use_regex", True) else _BYTES]
    if kind == "Digits":
        return ["digits" if given.get("individual_digits") else "runs of digits"]
    if kind == "Punctuation":
        return ["punctuation"]
    if kind == "Split" and isinstance(given.get("pattern"), Mapping) and not given.get("invert"):
        return [str(given["pattern"].get("Regex", given["pattern"].get("String")))]
    return [str(kind)]
