"""The paths of the Responses API."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.errors import shown
from edgeinfer.model import Model
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.responses.requests import ResponsesRequest, responses_request
from edgeinfer.serving.responses.response_writer import ResponsesFormat
from edgeinfer.serving.responses.store import ResponseStore

MAX_LISTED = 100


def responses_routes(store: ResponseStore) -> tuple[AnyRoute, ...]:
    """The routes over stored responses."""
    one = "/v1/responses/{response_id}"
    return (
        CompletionRoute("/v1/responses", partial(responses_request, store=store), partial(_writer, store)),
        PlainRoute("/v1/responses/input_tokens", partial(_input_tokens, store), ("POST",)),
        PlainRoute(one, partial(_get, store)),
        PlainRoute(one, partial(_delete, store), ("DELETE",)),
        PlainRoute(f"{one}/input_items", partial(_input_items, store)),
    )


def _writer(store: ResponseStore, model: Model, parsed: CompletionRequest) -> ResponsesFormat:
    assert isinstance(parsed, ResponsesRequest)
    return ResponsesFormat(model, parsed, store)


async def _input_tokens(store: ResponseStore, request: Request, server: Server) -> Response:
    parsed = responses_request(await server.body(request), store)
    tokens = await server.prompt_tokens(parsed, partial(_writer, store))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})


async def _get(store: ResponseStore, request: Request, server: Server) -> Response:
    if request.query_params.get("stream", "false").lower() == "true":
        raise RequestError("stream: a stored response can't be streamed again; leave it out", param="stream")
    return JSONResponse(store.get(request.path_params["response_id"]).response)


async def _delete(store: ResponseStore, request: Request, server: Server) -> Response:
    response_id = request.path_params["response_id"]
    store.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _input_items(store: ResponseStore, request: Request, server: Server) -> Response:
    """The input items, the newest first, unless `order` is asc."""
    query = request.query_params
    items = list(store.get(request.path_params["response_id"]).input)
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"order: saw {shown(order)}, wanted asc or desc", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
        raise RequestError(f"limit: saw {shown(limit)}, wanted 1 to {MAX_LISTED}", param="limit")
    items = items if order == "asc" else items[::-1]
    if after := query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError(f"after: saw {shown(after)}, wanted the id of an input item", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return JSONResponse({"object": "list", "data": page, "has_more": len(page) < len(items), **ends})
