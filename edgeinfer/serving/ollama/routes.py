"""The paths of Ollama's API: completions, embeddings, and the models of the server."""

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.model import Model
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server, TextsRoute
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.fields import KnownFields, check_fields
from edgeinfer.serving.models.details import ModelDetails, details_of
from edgeinfer.serving.models.models import ModelCard, card_of
from edgeinfer.serving.ollama.requests import (
    OllamaRequest,
    chat_request,
    embed_request,
    generate_request,
    model_name,
    one_embedding_request,
)
from edgeinfer.serving.ollama.writers import OllamaFormat, embed_reply

API_VERSION = "0.12.0"
"""The version of Ollama whose API this one follows: programs refuse older ones."""
SHOW = KnownFields(frozenset(("model", "name", "verbose")))
FOREVER = datetime(2318, 1, 1, tzinfo=UTC)
"""As Ollama shows a model that is never unloaded."""


def _writer(model: Model, parsed: CompletionRequest) -> OllamaFormat:
    assert isinstance(parsed, OllamaRequest)
    return OllamaFormat(model, parsed)


def _model(card: ModelCard) -> dict[str, Any]:
    """The fields of a model in every list. The digest identifies the file; it isn't one of its contents."""
    details = details_of(card)
    identity = f"{card.path}:{card.size_bytes}:{card.modified}"
    return {
        "name": card.name,
        "model": card.name,
        "size": card.size_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(card, details),
        "modified_at": _modified(card),
    }


def _details(card: ModelCard, details: ModelDetails) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": details.architecture,
        "families": [details.architecture] if details.architecture else [],
        "parameter_size": card.parameters,
        "quantization_level": details.quantization,
    }


def _modified(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.modified, UTC).isoformat()


async def _tags(request: Request, server: Server) -> Response:
    models = await _models(await server.models.cards())
    return JSONResponse({"models": models})


async def _models(cards: Sequence[ModelCard]) -> list[dict[str, Any]]:
    """The models with what their files' headers say, which are read on another thread."""
    return await asyncio.to_thread(lambda: [_model(card) for card in cards])


async def _running(request: Request, server: Server) -> Response:
    loaded = [card for card in await server.models.cards() if card.state == "loaded"]
    models = zip(await _models(loaded), loaded, strict=True)
    return JSONResponse({"models": [model | _loaded(card) for model, card in models]})


def _loaded(card: ModelCard) -> dict[str, Any]:
    expires = FOREVER if card.expires is None else datetime.fromtimestamp(card.expires, UTC)
    return {
        "size": card.loaded_bytes or card.size_bytes,
        "size_vram": card.gpu_bytes,
        "expires_at": expires.isoformat(),
        "context_length": card.context or 0,
    }


async def _show(request: Request, server: Server) -> Response:
    body = await server.body(request)
    check_fields(body, SHOW)
    card = await card_of(server.models, model_name(body))
    details = await asyncio.to_thread(details_of, card)
    return JSONResponse(
        {
            "modelfile": f"FROM {card.name}",
            "parameters": "",
            "template": details.template,
            "details": _details(card, details),
            "model_info": dict(details.metadata),
            "capabilities": list(details.capabilities),
            "modified_at": _modified(card),
        }
    )


async def _version(request: Request, server: Server) -> Response:
    return JSONResponse({"version": API_VERSION, "server": "edgeinfer"})


OLLAMA_ROUTES: tuple[AnyRoute, ...] = (
    CompletionRoute("/api/chat", chat_request, _writer),
    CompletionRoute("/api/generate", generate_request, _writer),
    TextsRoute("/api/embed", embed_request, embed_reply),
    TextsRoute("/api/embeddings", one_embedding_request, embed_reply),
    PlainRoute("/api/tags", _tags),
    PlainRoute("/api/ps", _running),
    PlainRoute("/api/show", _show, ("POST",)),
    PlainRoute("/api/version", _version),
)
