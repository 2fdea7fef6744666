"""The paths of Anthropic's API."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.serving.anthropic.message_format import MessageFormat
from edgeinfer.serving.anthropic.requests import count_request, messages_request
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server
from edgeinfer.serving.fields import RequestError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def anthropic_failure(error: RequestError) -> Response:
    """An error object of Anthropic's format."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": str(error)}}
    return JSONResponse(body, status_code=error.status)


async def _count_tokens(request: Request, server: Server) -> Response:
    parsed = count_request(await server.body(request))
    return JSONResponse({"input_tokens": await server.prompt_tokens(parsed, MessageFormat)})


ANTHROPIC_ROUTES: tuple[AnyRoute, ...] = (
    CompletionRoute("/v1/messages", messages_request, MessageFormat, anthropic_failure),
    PlainRoute("/v1/messages/count_tokens", _count_tokens, ("POST",), anthropic_failure),
)
