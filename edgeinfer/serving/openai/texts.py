"""/v1/embeddings and /v1/rerank: reads their bodies and writes their responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.fields import (
    KnownFields,
    RequestError,
    check_fields,
    checked_bool,
    checked_count,
    checked_list,
    checked_text,
)
from edgeinfer.serving.openai import replies
from edgeinfer.serving.openai.known_fields import WITHOUT_EFFECT
from edgeinfer.serving.text_steps import TextSteps

MAX_TEXTS = 2048

EMBEDDING = KnownFields(
    frozenset(("model", "input", "encoding_format")),
    {"dimensions": "vectors have the model's hidden size"},
    WITHOUT_EFFECT,
)
RERANK = KnownFields(frozenset(("model", "query", "documents", "top_n", "return_documents")))


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts to embed; `as_base64`: encoding of the vectors."""

    model: str
    texts: tuple[str, ...]
    as_base64: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RerankRequest:
    """Texts to rank for a query. `count`: the number of results; `with_texts`: results contain the texts."""

    model: str
    query: str
    texts: tuple[str, ...]
    count: int
    with_texts: bool
    warnings: tuple[str, ...] = ()


def embedding_request(body: Mapping[str, Any]) -> EmbeddingRequest:
    """POST /v1/embeddings."""
    warnings = check_fields(body, EMBEDDING)
    given = body.get("input")
    texts = [given] if isinstance(given, str) else checked_list(given, "input", MAX_TEXTS, "texts")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError("input: wanted a text, or a list of texts", param="input")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64", None):
        raise RequestError(
            f"encoding_format: saw {shown(encoding)}, wanted float or base64", param="encoding_format"
        )
    return EmbeddingRequest(checked_text(body, "model"), tuple(texts), encoding == "base64", tuple(warnings))


def rerank_request(body: Mapping[str, Any]) -> RerankRequest:
    """POST /v1/rerank: the fields of Jina and Cohere."""
    warnings = check_fields(body, RERANK)
    query = checked_text(body, "query")
    if not query:
        raise RequestError("query: wanted a text", param="query")
    given = checked_list(body.get("documents"), "documents", MAX_TEXTS, "texts")
    texts = [each.get("text") if isinstance(each, Mapping) else each for each in given]
    plain = tuple(text for text in texts if isinstance(text, str))
    if not plain or len(plain) != len(texts):
        raise RequestError("documents: wanted a list of texts", param="documents")
    count = checked_count(body, "top_n", len(plain), 1, 1 << 31)
    with_texts = checked_bool(body, "return_documents")
    return RerankRequest(checked_text(body, "model"), query, plain, count, with_texts, tuple(warnings))


async def embedding_reply(steps: TextSteps, parsed: EmbeddingRequest) -> dict[str, Any]:
    """The response of /v1/embeddings."""
    of = await steps.vectors(parsed.texts)
    return replies.embeddings(steps.model.name, of.vectors, of.tokens, parsed.as_base64)


async def rerank_reply(steps: TextSteps, parsed: RerankRequest) -> dict[str, Any]:
    """The response of /v1/rerank."""
    of = await steps.ranking(parsed.query, parsed.texts)
    return replies.ranking(steps.model.name, of.texts[: parsed.count], of.tokens, parsed.with_texts)
