"""Ranking of texts by their relevance to a query, with a classifier or with the answer yes or no."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer.embedding import Vectors, pooled
from edgeinfer.errors import SettingError
from edgeinfer.model_config.config import ModelConfig
from edgeinfer.model_config.pooling_head import PoolingHead
from edgeinfer.tokenizer import Tokenizer

RANK_POOLING = 4
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
YES_NO_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, whose score is the probability of "yes". Source: its model card."""


@dataclass(frozen=True)
class RankedText:
    """One of the texts of `rank`: its index, its score (higher is more relevant) and itself."""

    index: int
    score: float
    text: str


class Ranking(NamedTuple):
    """The texts, most relevant first, and the number of tokens processed."""

    texts: list[RankedText]
    tokens: int


def ranked(texts: Sequence[str], scores: Sequence[float]) -> list[RankedText]:
    """The texts, most relevant first."""
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    return [RankedText(index, float(scores[index]), texts[index]) for index in order]


@dataclass(frozen=True)
class Ranker:
    """How a model scores a text for a query: by its classifier, or by the logits of "yes" and "no".

    `template`: the prompt with {query} and {document}; None: a pair of texts.
    """

    tokenizer: Tokenizer
    head: PoolingHead
    template: str | None = None
    answers: tuple[int, int] | None = None
    """The ids of "yes" and "no"; None: there is a classifier."""

    def ids(self, query: str, text: str) -> list[int]:
        """The token ids of a query with a text."""
        if self.template is None:
            return self.tokenizer.encode_pair(query, text)
        encode, given = self.tokenizer.encode, {"{query}": query, "{document}": text}
        parts = re.split(r"(\{query\}|\{document\})", self.template)
        if all(encode(each) == encode(each, special=True) for each in given.values()):
            # As in training: a token may begin in the template and end in a text.
            return encode("".join(given.get(part, part) for part in parts), special=True)
        ids = [encode(given.get(part, part), special=part not in given) for part in parts]
        return [token for each in ids for token in each]

    def classified(self, rows: Vectors) -> float:
        """The score of hidden states (tokens, hidden_size)."""
        return float(self.head.scores(pooled(rows, self.head.pooling)[None])[0, 0])

    def answered(self, logits: npt.NDArray[np.float32]) -> float:
        """The probability of "yes" from logits (vocabulary,)."""
        assert self.answers is not None
        yes, no = (float(logits[answer]) for answer in self.answers)
        return float(1 / (1 + np.exp(np.clip(no - yes, -80, 80))))


def ranker_of(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, config: ModelConfig, head: PoolingHead
) -> Ranker | None:
    """How the model of a file ranks texts; None: it is no reranker."""
    template = metadata.get("tokenizer.chat_template.rerank")
    template = template if isinstance(template, str) else None
    if head.ranks:
        return Ranker(tokenizer, head, template)
    named = " ".join(str(metadata.get(f"general.{key}", "")) for key in ("name", "basename")).lower()
    if config.is_encoder or "rerank" not in named:
        return None
    yes, no = (tokenizer.encode(answer) for answer in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        return None
    return Ranker(tokenizer, head, template or YES_NO_TEMPLATE, (yes[0], no[0]))


def checked_query(query: object) -> str:
    """The query. Raises `SettingError`: it is no text."""
    if not isinstance(query, str) or not query:
        raise SettingError(f"rank: saw {type(query).__name__} as query, wanted a text")
    return query
