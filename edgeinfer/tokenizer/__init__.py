"""Tokenizers from the metadata of a GGUF file."""

from edgeinfer.tokenizer.detokenizer import StreamDecoder
from edgeinfer.tokenizer.pre_tokenizers import known_pre_tokenizers
from edgeinfer.tokenizer.tokenizer import Tokenizer, tokenizer_kind
from edgeinfer.tokenizer.vocabulary import SpecialIds, TokenType, Vocabulary

__all__ = [
    "SpecialIds",
    "StreamDecoder",
    "TokenType",
    "Tokenizer",
    "Vocabulary",
    "known_pre_tokenizers",
    "tokenizer_kind",
]
