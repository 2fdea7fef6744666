"""Error responses of OpenAI's format."""

from typing import Any

from starlette.responses import JSONResponse


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failure(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """A response with an error object."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(error(message, kind, param, code), status_code=status)
