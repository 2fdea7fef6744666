"""The paths of OpenAI's API, and of its additions by other servers."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server, TextsRoute
from edgeinfer.serving.models.models import ModelCard, card_of
from edgeinfer.serving.openai.chat_format import ChatFormat
from edgeinfer.serving.openai.requests import chat_request, text_request
from edgeinfer.serving.openai.text_format import TextFormat
from edgeinfer.serving.openai.texts import (
    embedding_reply,
    embedding_request,
    rerank_reply,
    rerank_request,
)

RERANK_PATHS = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")


def _model(card: ModelCard, started: int) -> dict[str, Any]:
    """OpenAI's model object with the state, and with the fields of Anthropic's."""
    created = int(card.modified) or started
    return {
        "id": card.name,
        "object": "model",
        "created": created,
        "owned_by": "edgeinfer",
        "context": card.context,
        "state": card.state,
        "parallel": card.parallel,
        "cache_bytes": card.cache_bytes,
        "type": "model",
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
    }


async def _models(request: Request, server: Server) -> Response:
    cards = [_model(card, server.started) for card in await server.models.cards()]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
    return JSONResponse({"object": "list", "data": cards, "has_more": False, **ends})


async def _one_model(request: Request, server: Server) -> Response:
    return JSONResponse(_model(await card_of(server.models, request.path_params["name"]), server.started))


async def _health(request: Request, server: Server) -> Response:
    loaded = list(server.models.loaded)
    return JSONResponse(
        {"status": "ok", "waiting": server.waiting, "running": server.running, "loaded": loaded}
    )


async def _metrics(request: Request, server: Server) -> Response:
    text, media_type = server.metrics()
    return Response(text, media_type=media_type)


OPENAI_ROUTES: tuple[AnyRoute, ...] = (
    PlainRoute("/health", _health, is_open=True),
    PlainRoute("/metrics", _metrics),
    PlainRoute("/v1/models", _models),
    PlainRoute("/v1/models/{name:path}", _one_model),
    CompletionRoute("/v1/chat/completions", chat_request, ChatFormat),
    CompletionRoute("/v1/completions", text_request, TextFormat),
    TextsRoute("/v1/embeddings", embedding_request, embedding_reply),
    *(TextsRoute(path, rerank_request, rerank_reply) for path in RERANK_PATHS),
)
