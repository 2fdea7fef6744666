"""Special tokens recognized in text, and those that absorb adjacent spaces."""

from collections.abc import Mapping
from typing import Any

from edgeinfer.tokenizer.special_splitting import SpecialToken
from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary

_JINA_PRE_TOKENIZERS = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MASK_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def special_tokens(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> list[SpecialToken]:
    """Return the control, unknown and user-defined tokens of a file.

    GGUF doesn't mark tokens that absorb adjacent spaces, so they are selected by the model's name. Source:
    llama.cpp, `llama-vocab.cpp`.
    """
    takes_before, all_take_behind = _space_takers(metadata)
    return [
        SpecialToken(
            token_id,
            text := vocabulary.texts[token_id],
            takes_space_before=text == takes_before,
            takes_space_behind=all_take_behind and text not in _PHI3_KEEPS_SPACE,
        )
        for token_id in vocabulary.of_types(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]


def _space_takers(metadata: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the text of the token that absorbs the space before it, and whether all absorb the space
    after.
    """
    name = str(metadata.get("general.name", "")).lower()
    architecture = str(metadata.get("general.architecture", ""))
    pre_tokenizer = str(metadata.get("tokenizer.ggml.pre", ""))
    if any(known in pre_tokenizer for known in _JINA_PRE_TOKENIZERS) or any(
        known in architecture for known in _MASK_ARCHITECTURES
    ):
        return "<mask>", False
    if "phi-3" in name or "phi3" in name:
        return None, True
    return ("[MASK]" if "modern-bert" in name else None), False
