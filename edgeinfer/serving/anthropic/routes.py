"""The paths of Anthropic's API."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.serving.anthropic.message_format import MessageFormat
from edgeinfer.serving.anthropic.requests import count_request, messages_request
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server


async def _count_tokens(request: Request, server: Server) -> Response:
    parsed = count_request(await server.body(request))
    return JSONResponse({"input_tokens": await server.prompt_tokens(parsed, MessageFormat)})


ANTHROPIC_ROUTES: tuple[AnyRoute, ...] = (
    CompletionRoute("/v1/messages", messages_request, MessageFormat),
    PlainRoute("/v1/messages/count_tokens", _count_tokens, ("POST",)),
)
