"""Access checks: the request's host, its origin, and the type of its body."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.transport.failures import failure

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
ANY_HOST = "*"
WITH_BODY = ("POST", "PUT", "PATCH")
CURL_KINDS = ("", "application/x-www-form-urlencoded")
"""Types of a body that curl sends unless it is given one."""


class Access:
    """Refuses requests for another host, from foreign web pages, and those whose body isn't JSON.

    A web page can send requests to this machine without permission. The browser adds `Origin` and
    `Sec-Fetch-Site`, which no page can change. `hosts`: allowed host names of this machine.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before its body is read."""
        refused = self._refused(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, message = refused
        await failure(RequestError(message, status), scope["path"])(scope, receive, send)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """The status and message of a refusal."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if ANY_HOST not in self._hosts and _name(host) not in self._hosts:
            return 400, f"Host: saw {shown(host)}, wanted an address that this server listens on"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return (
                403,
                f"Sec-Fetch-Site: saw {shown(headers['sec-fetch-site'])}; web pages can't use this server",
            )
        origin = headers.get("origin")
        if origin is not None and not (origin.startswith("http") and _netloc(origin) == host.lower()):
            return 403, f"Origin: saw {shown(origin)}; pages of other origins can't use this server"
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if scope["method"] in WITH_BODY and kind != "application/json":
            hint = '; with curl: -H "Content-Type: application/json"' if kind in CURL_KINDS else ""
            return 415, f"Content-Type: saw {shown(kind)}, wanted application/json{hint}"
        return None


def _name(host: str) -> str:
    """The host of a `Host` header, without port and brackets; empty if it is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
