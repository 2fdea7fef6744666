"""Error responses, in the format of the API that a path belongs to."""

from typing import Any

from starlette.responses import JSONResponse

from edgeinfer.errors import EdgeInferError
from edgeinfer.options import LoadOptions
from edgeinfer.options.option_names import with_flags
from edgeinfer.serving.fields import RequestError

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def message_of(error: EdgeInferError) -> str:
    """The text of an error; options of the server's start are named by their flags."""
    return with_flags(str(error), (LoadOptions,))


def failure(failed: RequestError, path: str) -> JSONResponse:
    """The response to a request of `path`."""
    if path.startswith("/v1/messages"):
        body = _anthropic_error(failed)
    elif path.startswith("/api/"):
        body = {"error": str(failed)}  # Ollama's
    else:
        kind = "server_error" if failed.status >= 500 else "invalid_request_error"
        body = openai_error(str(failed), kind, failed.param, failed.code)
    return JSONResponse(body, status_code=failed.status)


def openai_error(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _anthropic_error(failed: RequestError) -> dict[str, Any]:
    usual = "api_error" if failed.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_KINDS.get(failed.status, usual)
    return {"type": "error", "error": {"type": kind, "message": str(failed)}}
