"""The tokenizer of a model file."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from edgeinfer.errors import UnsupportedModelError
from edgeinfer.tokenizer import reasoning_marks, special_texts
from edgeinfer.tokenizer.detokenizer import StreamDecoder
from edgeinfer.tokenizer.encoders.byte_pair import BytePairEncoder
from edgeinfer.tokenizer.encoders.longest_match import LongestMatchEncoder
from edgeinfer.tokenizer.encoders.plamo import PlamoEncoder
from edgeinfer.tokenizer.encoders.sentence_piece import SentencePieceEncoder
from edgeinfer.tokenizer.encoders.unigram import UnigramEncoder
from edgeinfer.tokenizer.encoders.word_piece import WordPieceEncoder
from edgeinfer.tokenizer.pre_tokenizers import WHITESPACE, PreTokenizer, is_known, pre_tokenizer
from edgeinfer.tokenizer.special_tokens import SpecialSplitter, special_tokens
from edgeinfer.tokenizer.vocabulary import SpecialIds, TokenType, Vocabulary, flag, name, string_list
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import printable

_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "whitespace": {"bos": 11, "eos": 11},
    "bert": {"bos": 101, "sep": 102, "unk": 100, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "plamo2": {"bos": 1, "eos": 2, "unk": 0, "pad": 3},
}
"""Tokenizer type -> ids of roles if the file sets none. Source: llama.cpp."""
KINDS = {
    "llama": "SentencePiece",
    "gpt2": "byte pairs",
    "gemma4": "byte pairs",
    "whitespace": "byte pairs without whitespace",
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "longest match",
    "plamo2": "PLaMo 2",
}
"""`tokenizer.ggml.model` -> name of the tokenizer."""
_BYTE_PAIRS = ("gpt2", "gemma4", "whitespace")
_Encoder = (
    SentencePieceEncoder
    | BytePairEncoder
    | LongestMatchEncoder
    | WordPieceEncoder
    | UnigramEncoder
    | PlamoEncoder
)
_SPECIAL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED})
_ROBERTA_PRE_TOKENIZERS = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
_MARKS = frozenset((*special_texts.ALWAYS_SHOWN, *reasoning_marks.TOKEN_TEXTS))
_REASONING_TEXTS = frozenset(mark.encode() for mark in reasoning_marks.TOKEN_TEXTS)
_HIDDEN_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


class Tokenizer:
    """A model's tokenizer, of one of `KINDS`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: _Encoder,
        metadata: Mapping[str, Any],
        *,
        add_bos: bool,
        add_eos: bool | None = None,
        add_space_prefix: bool = False,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Initialize from parts; normally use `from_metadata` or `from_gguf`."""
        self.vocabulary = vocabulary
        self.vocabulary_size = len(vocabulary)
        self.special_ids: SpecialIds = vocabulary.special
        """All tokens with a role, including those of fill-in-the-middle."""
        self.bos_id = vocabulary.special.bos
        self.eos_id = vocabulary.special.eos
        self.eot_id = vocabulary.special.eot
        self.eom_id = vocabulary.special.eom
        self.pad_id = vocabulary.special.pad
        self.unk_id = vocabulary.special.unk
        self.end_ids = vocabulary.end_ids
        """The tokens that end generation."""
        self.add_bos = add_bos
        self.add_eos = flag(metadata, "add_eos_token", False) if add_eos is None else add_eos
        self._closing_id = vocabulary.special.sep if isinstance(encoder, WordPieceEncoder) else self.eos_id
        self._pair_ids = _pair_ids(vocabulary, encoder, metadata)
        self._prefix = " " if add_space_prefix else ""
        # These two add the space on their own, after normalization.
        self._strips_space = add_space_prefix or isinstance(encoder, WordPieceEncoder)
        if isinstance(encoder, UnigramEncoder):
            self._strips_space = encoder.begins_with_space
        self.warnings = warnings
        """Warnings about values that the file doesn't define and their replacements, one line each."""
        self.kind = tokenizer_kind(metadata)
        """The name of the algorithm, see `KINDS`."""
        self._encoder = encoder
        self._types: list[int] = vocabulary.types.tolist()
        specials = special_tokens(vocabulary, metadata)
        hidden = {token for token in specials if self._types[token.token_id] in _HIDDEN_TYPES}
        self.control_texts = tuple(t.text for t in specials if t in hidden or t.text in _MARKS)
        """The texts of control tokens, and of those that mark roles and reasoning."""
        self._all_special = SpecialSplitter(specials)
        shown = [token for token in specials if self._types[token.token_id] == TokenType.USER_DEFINED]
        self._shown_special = SpecialSplitter(shown)
        self._bytes: dict[int, bytes] = {}
        self._visible: dict[int, bytes] = {}
        """As `_bytes`, without control tokens."""

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str], unknown_pre: str | None = None) -> Self:
        """Read the tokenizer of a GGUF file, which may contain only a vocabulary.

        Raises:
            UnsupportedModelError: see `from_metadata`.
        """
        with GGUFFile.open(Path(path)) as file:
            return cls.from_metadata(file.metadata, unknown_pre=unknown_pre)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], unknown_pre: str | None = None) -> Self:
        """Create the tokenizer from GGUF metadata.

        `unknown_pre`: the pre-tokenizer to use if the file's is unknown.

        Raises:
            UnsupportedModelError: the tokenizer or its pre-tokenizer is not known, or a list is missing.
        """
        cls.check(metadata, unknown_pre)
        model = metadata["tokenizer.ggml.model"]
        if model in _BYTE_PAIRS:
            return cls._byte_pair(metadata, unknown_pre)
        vocabulary = Vocabulary(metadata, _DEFAULT_IDS.get(model, {}))
        adds_bos = flag(metadata, "add_bos_token", model == "llama")
        if model == "llama":
            prefix = flag(metadata, "add_space_prefix", True)
            encoder = SentencePieceEncoder(vocabulary)
            return cls(vocabulary, encoder, metadata, add_bos=adds_bos, add_space_prefix=prefix)
        if model == "bert":
            words = WordPieceEncoder(vocabulary, metadata)
            return cls(vocabulary, words, metadata, add_bos=True, add_eos=True)
        if model == "t5":
            adds_eos = flag(metadata, "add_eos_token", True)
            unigram = UnigramEncoder(vocabulary, metadata)
            return cls(vocabulary, unigram, metadata, add_bos=adds_bos, add_eos=adds_eos)
        if model == "plamo2":
            return cls(vocabulary, PlamoEncoder(vocabulary), metadata, add_bos=False, add_eos=False)
        return cls(vocabulary, LongestMatchEncoder(vocabulary), metadata, add_bos=adds_bos)

    @staticmethod
    def check(metadata: Mapping[str, Any], unknown_pre: str | None = None) -> None:
        """Raise `UnsupportedModelError` for an unknown tokenizer type; reads no vocabulary."""
        model = name(metadata, "model")
        if model not in KINDS:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model: {'missing' if model is None else printable(repr(model))}; wanted one "
                f"of {', '.join(KINDS)}; engine='llama.cpp' may run this file"
            )
        if model in _BYTE_PAIRS:
            _pre_tokenizer_of(metadata, unknown_pre)

    @classmethod
    def _byte_pair(cls, metadata: Mapping[str, Any], unknown_pre: str | None) -> Self:
        pre_tokenizer, warnings = _pre_tokenizer_of(metadata, unknown_pre)
        default_ids = dict(_DEFAULT_IDS.get(metadata["tokenizer.ggml.model"], {}))
        if not pre_tokenizer.has_default_bos:
            default_ids.pop("bos", None)
        vocabulary = Vocabulary(metadata, default_ids)
        optional = pre_tokenizer.merges_are_optional and "tokenizer.ggml.merges" not in metadata
        merges = [] if optional else string_list(metadata, "merges")
        return cls(
            vocabulary,
            BytePairEncoder(vocabulary, merges, pre_tokenizer),
            metadata,
            add_bos=pre_tokenizer.always_adds_bos or flag(metadata, "add_bos_token", pre_tokenizer.add_bos),
            warnings=warnings,
        )

    def encode(
        self,
        text: str,
        bos: bool = False,
        special: bool = False,
        restore: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Return the tokens of `text`.

        `bos` adds the tokens that the file specifies at the beginning and the end (`add_bos`, `add_eos`);
        `special` parses the names of control tokens in the text as those tokens. User-defined tokens are
        always parsed. Lone surrogates become U+FFFD. `restore` is applied to the text between special tokens,
        after these have been found.
        """
        ids: list[int] = []
        if bos and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        splitter = self._all_special if special else self._shown_special
        after_special = True
        for fragment in splitter.split(_without_surrogates(text)):
            if isinstance(fragment, int):
                ids.append(fragment)
                after_special = True
                continue
            prefix = self._prefix if after_special else ""
            plain = _without_surrogates(restore(fragment)) if restore else fragment
            ids += self._encoder.encode(prefix + plain)
            after_special = False
        if bos and self.add_eos and self._closing_id is not None:
            ids.append(self._closing_id)
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts as rerankers read them: with the tokens that the file specifies at
        the beginning, between the texts, and at the end.
        """
        begin = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        end = [self._closing_id] if self.add_eos and self._closing_id is not None else []
        return [*begin, *self.encode(first), *end, *self._pair_ids, *self.encode(second), *end]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Return the text of `ids`, the inverse of `encode`; `special` shows control tokens by their names.

        The space that `encode` adds before a text is removed again. Bytes that are not
        UTF-8 become U+FFFD. Spaces before punctuation stay, even if the original tokenizer removes them.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        pieces: list[bytes] = []
        strip = self._strips_space
        for token_id in ids:
            piece = self.token_bytes(token_id)
            kind = self._types[token_id]
            if kind in _SPECIAL_TYPES:
                strip = self._strips_space
                if kind in _HIDDEN_TYPES and not special:
                    continue
            elif strip:
                piece = piece.removeprefix(b" ")
                strip = False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; for a special token its name.

        Raises:
            ValueError: the id is not in the vocabulary.
        """
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._read_bytes(token_id)
        return data

    def _read_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocabulary_size:
            raise ValueError(f"token {token_id}: wanted an id from 0 to {self.vocabulary_size - 1}")
        text = self.vocabulary.texts[token_id]
        kind = self._types[token_id]
        if kind in _SPECIAL_TYPES:
            return text.encode("utf-8", "surrogateescape")
        if kind == TokenType.NORMAL:
            return self._encoder.token_bytes(text)
        if kind == TokenType.BYTE and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:-1])
        return b""

    def stream_decoder(self, special: bool = False) -> StreamDecoder:
        """Return a decoder for streamed tokens; control tokens give no text unless `special`, except those
        that mark reasoning.
        """
        if special:
            return StreamDecoder(self.token_bytes, self._bytes)
        return StreamDecoder(self._visible_bytes, self._visible)

    def _visible_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        return b"" if self.is_control(token_id) and data not in _REASONING_TEXTS else data

    def is_control(self, token_id: int) -> bool:
        """Whether a token gives no text in a response."""
        return self._types[token_id] in _HIDDEN_TYPES

    def token_type(self, token_id: int) -> TokenType:
        """Return the type of a token; a type that GGUF doesn't define counts as unused."""
        kind = self._types[token_id]
        return TokenType(kind) if kind in TokenType.__members__.values() else TokenType.UNUSED


def tokenizer_kind(metadata: Mapping[str, Any]) -> str:
    """Return the name of a file's tokenizer, "" for an unknown one."""
    return KINDS.get(str(metadata.get("tokenizer.ggml.model")), "")


def _pre_tokenizer_of(
    metadata: Mapping[str, Any], unknown_pre: str | None
) -> tuple[PreTokenizer, tuple[str, ...]]:
    """Return the file's pre-tokenizer, and a warning if it had to be assumed."""
    if metadata["tokenizer.ggml.model"] == "gemma4":
        return pre_tokenizer("gemma4"), ()
    if metadata["tokenizer.ggml.model"] == "whitespace":
        return replace(WHITESPACE, lowercase=flag(metadata, "normalizer.lowercase", False)), ()
    pre = name(metadata, "pre")
    if not pre:
        note = "tokenizer.ggml.pre is missing: the pre-tokenizer 'default' is assumed; the output may suffer"
        return pre_tokenizer("default"), (note,)
    if unknown_pre is not None and not is_known(pre):
        note = (
            f"tokenizer.ggml.pre: {printable(pre)!r} is not known: {unknown_pre!r} is taken instead; "
            "the output may suffer"
        )
        return pre_tokenizer(unknown_pre), (note,)
    return pre_tokenizer(pre), ()


def _without_surrogates(text: str) -> str:
    """Return `text` with lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _pair_ids(vocabulary: Vocabulary, encoder: _Encoder, metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens between two texts, after the one that ends the first; BERT has only that one, and
    RoBERTa one more.
    """
    separator = vocabulary.special.eos if vocabulary.special.sep is None else vocabulary.special.sep
    if separator is None or vocabulary.texts[separator] == "[SEP]" or isinstance(encoder, WordPieceEncoder):
        return []
    is_roberta = isinstance(encoder, UnigramEncoder) or name(metadata, "pre") in _ROBERTA_PRE_TOKENIZERS
    return [separator] if flag(metadata, "add_sep_token", is_roberta) else []
