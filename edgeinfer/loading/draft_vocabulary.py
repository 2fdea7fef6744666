"""Whether a model can draft for another: both have the same tokens, but for some at the end of one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgeinfer.errors import SettingError
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.tokenizer.vocabulary import string_list

MAX_EXTRA_TOKENS = 1024
"""Tokens, padding most often, by which vocabularies of one family are seen to differ in length."""


class OtherVocabularyError(SettingError):
    """A draft has other tokens than its model: what it guesses means nothing there."""


def same_tokens(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two files' metadata list the same tokens, but for some more at the end of one. Then no
    tokenizer has to be built, and no token's bytes looked at, to know that their ids mean the same.
    """
    kinds = [metadata.get("tokenizer.ggml.model") for metadata in (one, other)]
    texts = [string_list(metadata, "tokens") for metadata in (one, other)]
    types = [np.asarray(metadata.get("tokenizer.ggml.token_type", ())) for metadata in (one, other)]
    shared = min(map(len, texts))
    return (
        kinds[0] == kinds[1]
        and max(map(len, texts)) - shared <= MAX_EXTRA_TOKENS
        and texts[0][:shared] == texts[1][:shared]
        and np.array_equal(types[0][:shared], types[1][:shared])
    )


def check_vocabularies(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise `OtherVocabularyError` unless both have the same tokens, but for some more at the end of one."""
    shared = min(draft.vocabulary_size, target.vocabulary_size)
    extra = max(draft.vocabulary_size, target.vocabulary_size) - shared
    if extra > MAX_EXTRA_TOKENS:
        raise OtherVocabularyError(
            f"draft: {name} has {draft.vocabulary_size} tokens, the model {target.vocabulary_size}; wanted "
            "the same vocabulary"
        )
    for token_id in range(shared):
        if draft.token_bytes(token_id) != target.token_bytes(token_id):
            raise OtherVocabularyError(
                f"draft: token {token_id} of {name} is {draft.token_bytes(token_id)!r}, that of the model "
                f"{target.token_bytes(token_id)!r}; wanted the same vocabulary"
            )
