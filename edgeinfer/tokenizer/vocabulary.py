"""The tokens of a model file: texts, types, scores, and special roles."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.tokenizer import special_texts
from edgeinfer_quant_formats.errors import printable

Metadata = Mapping[str, Any]

_PREFIX = "tokenizer.ggml."
_BYTE_TEXT = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenType(IntEnum):
    """The type of a token. Source: gguf `llama_token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SpecialIds:
    """Tokens with a special role; None if the file has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    fim_prefix: int | None = None
    fim_suffix: int | None = None
    fim_middle: int | None = None
    fim_pad: int | None = None
    fim_repository: int | None = None
    fim_separator: int | None = None


# role -> (metadata keys, the later ones deprecated; texts to search for if no key is set)
_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bos": (("bos_token_id",), ()),
    "eos": (("eos_token_id",), ()),
    "eot": (("eot_token_id",), special_texts.END_OF_TURN),
    "eom": (("eom_token_id",), special_texts.END_OF_MESSAGE),
    "unk": (("unknown_token_id",), ()),
    "sep": (("seperator_token_id",), ()),
    "pad": (("padding_token_id",), ()),
    "mask": (("mask_token_id",), ()),
    "fim_prefix": (("fim_pre_token_id", "prefix_token_id"), special_texts.FIM_PREFIX),
    "fim_suffix": (("fim_suf_token_id", "suffix_token_id"), special_texts.FIM_SUFFIX),
    "fim_middle": (("fim_mid_token_id", "middle_token_id"), special_texts.FIM_MIDDLE),
    "fim_pad": (("fim_pad_token_id",), special_texts.FIM_PAD),
    "fim_repository": (("fim_rep_token_id",), special_texts.FIM_REPOSITORY),
    "fim_separator": (("fim_sep_token_id",), special_texts.FIM_SEPARATOR),
}


class Vocabulary:
    """Texts, types and scores of all tokens, and the special ones among them."""

    def __init__(self, metadata: Metadata, default_ids: Mapping[str, int]) -> None:
        """Read the tokens; `default_ids`: ids of roles for this tokenizer type if no key sets them.

        Raises:
            UnsupportedModelError: a list is missing or shorter than the list of tokens.
        """
        texts = string_list(metadata, "tokens")
        if not all(texts):
            texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        self.texts = texts
        self.ids: dict[str, int] = dict(zip(self.texts, range(len(self.texts)), strict=True))
        self.types: npt.NDArray[np.int32] = self._numbers(metadata, "token_type", TokenType.NORMAL, np.int32)
        self._check_bytes()
        self.scores: npt.NDArray[np.float32] = self._numbers(metadata, "scores", 0.0, np.float32)
        self.special = SpecialIds(
            **{part: self._part(metadata, part, default_ids.get(part)) for part in _PARTS}
        )
        self.end_ids: frozenset[int] = frozenset(self._end_ids())

    def __len__(self) -> int:
        return len(self.texts)

    def of_types(self, *types: TokenType) -> list[int]:
        """Return the ids of all tokens of one of `types`, ascending."""
        return [int(index) for index in np.flatnonzero(np.isin(self.types, types))]

    def byte_ids(self) -> list[int | None]:
        """Return for each byte value its token: `<0x41>`, or else the byte as a text."""
        hexadecimal = (self.ids.get(f"<0x{byte:02X}>") for byte in range(256))
        raw = (self.ids.get(bytes([byte]).decode("utf-8", "surrogateescape")) for byte in range(256))
        return [
            first if first is not None else second for first, second in zip(hexadecimal, raw, strict=True)
        ]

    def _check_bytes(self) -> None:
        """Raise `UnsupportedModelError` for a token of type BYTE with an invalid name, as `<0xZZ>`."""
        for index in self.of_types(TokenType.BYTE):
            text = self.texts[index]
            if text.startswith("<0x") and text.endswith(">") and not _BYTE_TEXT.fullmatch(text):
                raise UnsupportedModelError(
                    f"{_PREFIX}tokens: token {index} is {printable(text)}, wanted <0x00> to <0xFF> as its "
                    "type is BYTE"
                )

    def _numbers(self, metadata: Metadata, key: str, default: float, dtype: type[Any]) -> npt.NDArray[Any]:
        values = metadata.get(_PREFIX + key)
        if values is None:
            return np.full(len(self), default, dtype=dtype)
        numbers = np.asarray(values)
        if numbers.ndim != 1 or numbers.size < len(self) or numbers.dtype.kind not in "iuf":
            raise UnsupportedModelError(
                f"{_PREFIX}{key}: {numbers.size} values of type {numbers.dtype}; "
                f"wanted a number for each of the {len(self)} tokens"
            )
        return numbers[: len(self)].astype(dtype)

    def _part(self, metadata: Metadata, part: str, default: int | None) -> int | None:
        keys, texts = _PARTS[part]
        token_id = default if default is not None and default < len(self) else None
        for key in keys:
            value = metadata.get(_PREFIX + key)
            if isinstance(value, int | np.integer) and 0 <= value < len(self):
                token_id = int(value)
        if token_id is None:
            token_id = next((self.ids[text] for text in texts if text in self.ids), None)
            if token_id is not None:
                self.types[token_id] = TokenType.CONTROL
        return token_id

    def _end_ids(self) -> set[int]:
        """Return the tokens that end generation, and correct the types of some. Source: llama.cpp."""
        special = self.special
        known = self._ids_of(special_texts.END_OF_GENERATION)
        self.types[list(known.values())] = TokenType.CONTROL
        self.types[list(self._ids_of(special_texts.ALWAYS_SHOWN).values())] = TokenType.USER_DEFINED
        fim = (special.fim_pad, special.fim_repository, special.fim_separator)
        named = (special.eos, special.eot, special.eom, *fim)
        ends = {token for token in named if token is not None} | set(known.values())
        texts = {self.texts[token]: token for token in ends}
        part_end = texts.get("<|end|>")
        if part_end is not None and any(pair <= texts.keys() for pair in special_texts.HARMONY_ENDS):
            ends.discard(part_end)
            self.types[part_end] = TokenType.USER_DEFINED
        plain = texts.get("</s>")
        if plain is not None and any(marker in texts for marker in special_texts.PLAIN_S_MARKERS):
            ends.discard(plain)
            self.types[plain] = TokenType.NORMAL
        return ends

    def _ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        return {text: self.ids[text] for text in texts if text in self.ids}


def string_list(metadata: Metadata, key: str) -> list[str]:
    """Return the list of texts `tokenizer.ggml.<key>`.

    Raises:
        UnsupportedModelError: it is missing or not a list of texts.
    """
    values = metadata.get(_PREFIX + key)
    if not isinstance(values, list) or (values and not isinstance(values[0], str)):
        seen = "missing" if values is None else f"a {type(values).__name__}"
        raise UnsupportedModelError(f"{_PREFIX}{key}: {seen}; wanted a list of texts")
    return values


def flag(metadata: Metadata, key: str, default: bool) -> bool:
    """Return the boolean `tokenizer.ggml.<key>`, or `default` if it is missing.

    Raises:
        UnsupportedModelError: it is not a boolean.
    """
    value = metadata.get(_PREFIX + key)
    if value is None:
        return default
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise wrong_type(key, value, "true or false")


def name(metadata: Metadata, key: str) -> str | None:
    """Return the text `tokenizer.ggml.<key>`, or None if it is missing.

    Raises:
        UnsupportedModelError: it is not a text.
    """
    value = metadata.get(_PREFIX + key)
    if value is None or isinstance(value, str):
        return value
    raise wrong_type(key, value, "a text")


def wrong_type(key: str, value: object, expected: str) -> UnsupportedModelError:
    """The error for a value of `tokenizer.ggml.<key>` of a wrong type; the value may be long."""
    seen = printable(" ".join(repr(value).split()))
    return UnsupportedModelError(f"{_PREFIX}{key}: saw {seen}, wanted {expected}")
