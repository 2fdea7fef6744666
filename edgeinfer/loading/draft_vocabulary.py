"""Checks whether one model can draft for another: the vocabularies must match, except at the end."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgeinfer.errors import SettingError
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.tokenizer.vocabulary import string_list

MAX_EXTRA_TOKENS = 1024
"""Maximum difference in vocabulary size seen within a model family; mostly padding tokens."""


class VocabularyMismatchError(SettingError):
    """The draft's vocabulary differs from the target's, so its token ids have another meaning."""


def same_tokens(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two files list the same tokens in their metadata, except for extra ones at the end of one. If
    so, their ids match without building a tokenizer or comparing token bytes.
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
    """Raise `VocabularyMismatchError` unless both have the same tokens, except for extra ones at the
    end of one.
    """
    shared = min(draft.vocabulary_size, target.vocabulary_size)
    extra = max(draft.vocabulary_size, target.vocabulary_size) - shared
    if extra > MAX_EXTRA_TOKENS:
        raise VocabularyMismatchError(
            f"draft: {name} has {draft.vocabulary_size} tokens, the model {target.vocabulary_size}; wanted "
            "the same vocabulary"
        )
    for token_id in range(shared):
        if draft.token_bytes(token_id) != target.token_bytes(token_id):
            raise VocabularyMismatchError(
                f"draft: token {token_id} of {name} is {draft.token_bytes(token_id)!r}, that of the model "
                f"{target.token_bytes(token_id)!r}; wanted the same vocabulary"
            )
