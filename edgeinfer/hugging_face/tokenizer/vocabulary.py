"""The vocabulary of a tokenizer.json in GGUF metadata: byte-level BPE, SentencePiece BPE, and unigram."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import shown
from edgeinfer.hugging_face.errors import folder_error
from edgeinfer.hugging_face.tokenizer.pre_tokenizer_names import described, pre_tokenizer_name
from edgeinfer.tokenizer.vocabulary import TokenType

PREFIX = "tokenizer.ggml."
SPACE = "▁"
MAX_TOKENS = 1 << 22
NORMALIZERS = ("NFC", "NFKC", "NFD", "NFKD", None)
"""Those that byte-level tokenizers may have; the texts of GGUF tokenizers aren't normalized."""


def vocabulary_metadata(folder: Path, tokenizer: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The tokens of a tokenizer for an embedding of this number of rows.

    Raises:
        FolderError: a kind of tokenizer that isn't supported, or a damaged one.
    """
    model = tokenizer.get("model")
    if not isinstance(model, Mapping):
        raise folder_error(folder, "tokenizer.json: no model, wanted a tokenizer")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind == "Unigram":
        return _unigram(folder, tokenizer, model, rows)
    if kind != "BPE":
        raise folder_error(folder, f"tokenizer.json: model {shown(kind)}, wanted BPE or Unigram")
    texts, types = _tokens(folder, tokenizer, _vocabulary(folder, model.get("vocab")), rows)
    merges = [_merge(folder, merge) for merge in model.get("merges") or ()]
    if model.get("byte_fallback"):
        return _sentence_piece(tokenizer, texts, types, merges)
    _check_normalizer(folder, tokenizer)
    name = pre_tokenizer_name(tokenizer)
    if name is None:
        raise folder_error(folder, f"tokenizer.json: unknown pre-tokenizer {described(tokenizer)}")
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": name,
        f"{PREFIX}tokens": texts,
        f"{PREFIX}token_type": types,
        f"{PREFIX}merges": [f"{first} {second}" for first, second in merges],
    }


def _vocabulary(folder: Path, given: Any) -> dict[str, int]:
    if not isinstance(given, Mapping) or not all(type(value) is int for value in given.values()):
        raise folder_error(folder, "tokenizer.json: no vocab, wanted token ids by text")
    return dict(given)


def _merge(folder: Path, merge: Any) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, Sequence) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
        raise folder_error(folder, f"tokenizer.json: merge {shown(merge)}, wanted two tokens")
    return parts[0], parts[1]


def _tokens(
    folder: Path, tokenizer: Mapping[str, Any], vocabulary: Mapping[str, int], rows: int
) -> tuple[list[str], npt.NDArray[np.int32]]:
    """The texts and types of all tokens; ids without a token are unused."""
    if not 0 < rows <= MAX_TOKENS:
        raise folder_error(folder, f"an embedding of {rows} rows, wanted 1 to {MAX_TOKENS}")
    texts = [f"[PAD{index}]" for index in range(rows)]
    types = np.full(rows, TokenType.UNUSED, np.int32)
    entries = [(text, index, TokenType.NORMAL) for text, index in vocabulary.items()]
    for added in tokenizer.get("added_tokens") or ():
        special = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        entries.append((str(added.get("content")), added.get("id"), special))
    for text, index, kind in entries:
        if type(index) is not int or not 0 <= index < rows:
            raise folder_error(
                folder,
                f"tokenizer.json: token {shown(text)} has id {shown(index)}, wanted 0 to {rows - 1}, a row "
                "of the embedding",
            )
        texts[index], types[index] = text, kind
    return texts, types


def _check_normalizer(folder: Path, tokenizer: Mapping[str, Any]) -> None:
    given = tokenizer.get("normalizer")
    parts = (
        given.get("normalizers")
        if isinstance(given, Mapping) and given.get("type") == "Sequence"
        else [given]
    )
    for part in parts or ():
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind not in NORMALIZERS:
            raise folder_error(folder, f"tokenizer.json: normalizer {shown(kind)}, wanted none or NFC")


def _sentence_piece(
    tokenizer: Mapping[str, Any],
    texts: list[str],
    types: npt.NDArray[np.int32],
    merges: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """A SentencePiece BPE: the score of a token is higher, the earlier its merge."""
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, rank)
    scores = np.array([-float(ranks.get(text, len(merges))) for text in texts], np.float32)
    _mark_bytes(texts, types, tokenizer)
    return {
        f"{PREFIX}model": "llama",
        f"{PREFIX}pre": "default",
        f"{PREFIX}tokens": texts,
        f"{PREFIX}scores": scores,
        f"{PREFIX}token_type": types,
        f"{PREFIX}add_space_prefix": _adds_space(tokenizer),
    }


def _mark_bytes(texts: list[str], types: npt.NDArray[np.int32], tokenizer: Mapping[str, Any]) -> None:
    for index, text in enumerate(texts):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[index] = TokenType.BYTE
    unknown = tokenizer["model"].get("unk_token")
    if unknown in texts:
        types[texts.index(unknown)] = TokenType.UNKNOWN


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a text gets a space before it."""
    normalizer, splitter = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    parts = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, Mapping) else []
    if any(isinstance(part, Mapping) and part.get("type") == "Prepend" for part in parts):
        return True
    splits = splitter.get("pretokenizers", [splitter]) if isinstance(splitter, Mapping) else []
    for part in splits:
        if isinstance(part, Mapping) and part.get("type") == "Metaspace":
            return part.get("prepend_scheme") != "never" and part.get("add_prefix_space") is not False
    return False


def _unigram(
    folder: Path, tokenizer: Mapping[str, Any], model: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """A unigram tokenizer, with the normalization that its precompiled map describes."""
    pieces = model.get("vocab")
    if not isinstance(pieces, list) or not all(isinstance(p, list) and len(p) == 2 for p in pieces):
        raise folder_error(folder, "tokenizer.json: no vocab, wanted pairs of token and score")
    vocabulary = {str(text): index for index, (text, _) in enumerate(pieces)}
    texts, types = _tokens(folder, tokenizer, vocabulary, rows)
    scores = np.zeros(rows, np.float32)
    scores[: len(pieces)] = [float(score) for _, score in pieces]
    unknown = model.get("unk_id")
    if type(unknown) is int and 0 <= unknown < rows:
        types[unknown] = TokenType.UNKNOWN
    found = {
        f"{PREFIX}model": "t5",
        f"{PREFIX}pre": "default",
        f"{PREFIX}tokens": texts,
        f"{PREFIX}scores": scores,
        f"{PREFIX}token_type": types,
        f"{PREFIX}add_space_prefix": _adds_space(tokenizer),
        f"{PREFIX}remove_extra_whitespaces": True,
    }
    charsmap = _charsmap(folder, tokenizer.get("normalizer"))
    return found if charsmap is None else {**found, f"{PREFIX}precompiled_charsmap": charsmap}


def _charsmap(folder: Path, normalizer: Any) -> npt.NDArray[np.uint8] | None:
    """The precompiled map of a normalizer; None: there is none."""
    if not isinstance(normalizer, Mapping):
        return None
    for part in normalizer.get("normalizers", [normalizer]):
        if isinstance(part, Mapping) and part.get("type") == "Precompiled":
            try:
                raw = base64.b64decode(part.get("precompiled_charsmap") or "", validate=True)
            except (binascii.Error, TypeError, ValueError):
                raise folder_error(folder, "tokenizer.json: the precompiled_charsmap isn't base64") from None
            return np.frombuffer(raw, np.uint8)
    return None
