"""One HTTP request for the rest of a file, with the parts of its response needed to resume and verify.

Uses the standard library's client: it takes proxies from the environment, and huggingface_hub's download
discards partial data on failure.
"""

import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any
from urllib.parse import urlsplit

from edgeinfer.download.digests import digest_in, strong_tag
from edgeinfer.errors import DownloadError

MAX_PER_REQUEST = 16 << 30
"""Maximum bytes per request: the hub's servers refuse to send more than 50 GB in one response."""
LATER = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of temporary failures."""
BROKEN = (OSError, http.client.HTTPException)
"""Exceptions of a failed connection: refused, reset, timed out, closed early."""


class TemporaryFailureError(Exception):
    """The request failed temporarily. `after`: seconds to wait, as the server requests."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class RangeNotSatisfiableError(Exception):
    """The server has no byte at that offset."""


@dataclass(frozen=True)
class RemoteFile:
    """Address of a file. Unknown values are None; the server's response may provide them."""

    url: str
    name: str
    """Local file name, including folders of its repository."""
    size_bytes: int | None = None
    sha256: str | None = None
    """64 hexadecimal digits."""
    digest_source: str = ""
    """Source of `sha256`: "models.toml", "the hub"."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request to this host only: a token, the name of this program."""
    login: str = ""
    """Advice for the user if the server requires a login."""


@dataclass(frozen=True)
class HttpResponse:
    """A response whose body begins at byte `first` of the file."""

    body: http.client.HTTPResponse
    first: int
    total: int | None
    """Bytes of the whole file."""
    tag: str | None
    """The strong entity tag."""
    digest: tuple[str, str] | None
    """The sha256 from the server, and the name of its header."""


def request(remote: RemoteFile, first: int, tag: str | None, stall_seconds: float) -> HttpResponse:
    """Request a file from byte `first` on; with `tag`, only if it is still that version.

    A server without range support, or with another version, responds from byte 0.

    Raises:
        TemporaryFailureError: a temporary failure.
        RangeNotSatisfiableError: the file isn't that long.
        DownloadError: a permanent failure.
    """
    headers = {"User-Agent": "edgeinfer", **remote.headers, "Accept-Encoding": "identity"}
    headers["Range"] = f"bytes={first}-{first + MAX_PER_REQUEST - 1}"
    if first and tag:
        headers["If-Range"] = tag
    if urlsplit(remote.url).scheme not in ("http", "https"):
        raise DownloadError(f"{remote.url}: wanted an address that begins with https:// or http://")
    redirects = _Redirects()
    try:
        http_request = urllib.request.Request(remote.url, headers=headers)
        body = _opener(redirects).open(http_request, timeout=stall_seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(remote, error) from error
    except ValueError as error:  # raised by http.client for a URL with spaces or control characters
        raise DownloadError(f"{remote.url!r}: no such address: {error}") from error
    except BROKEN as error:
        raise _connection_error(remote, error) from error
    try:
        return _http_response(remote, body, first, redirects.headers)
    except BaseException:
        body.close()
        raise


def _http_response(
    remote: RemoteFile, body: http.client.HTTPResponse, first: int, hops: Mapping[str, str]
) -> HttpResponse:
    headers = dict(body.headers.items())
    packing = body.headers.get("Content-Encoding", "identity")
    if packing != "identity":
        raise DownloadError(f"{remote.url}: sent compressed ({packing}), wanted the file uncompressed")
    length = _number(body.headers.get("Content-Length"))
    if body.status == 206:
        start, total = _range(body.headers.get("Content-Range", ""))
        if start != first:
            raise TemporaryFailureError(
                f"{_host(remote.url)} responded from byte {start}, wanted byte {first}"
            )
    else:
        start, total = 0, length
    digest = digest_in(headers) or digest_in(hops)
    return HttpResponse(body, start, total, strong_tag(body.headers.get("ETag")), digest)


def _range(text: str) -> tuple[int | None, int | None]:
    """First byte and total of a Content-Range; None for missing values."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip(), re.ASCII)
    return (int(match[1]), _number(match[2])) if match else (None, None)


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII) else None


def _refusal(remote: RemoteFile, error: urllib.error.HTTPError) -> Exception:
    """The exception for an HTTP error."""
    reason = "" if 300 <= error.code < 400 else " ".join(str(error.reason).split())[:60]
    seen = f"{remote.url}: {error.code} {reason}".rstrip()
    if error.code == 416:
        return RangeNotSatisfiableError(seen)
    if error.code in LATER:
        return TemporaryFailureError(seen, _retry_after(error.headers.get("Retry-After")))
    if error.code in (401, 403):
        login = remote.login or "the server requires a login that edgeinfer doesn't have"
        return DownloadError(f"{seen}; {login}")
    if error.code in (404, 410):
        return DownloadError(f"{seen}; no such file")
    if 300 <= error.code < 400:
        return DownloadError(f"{seen}; the server redirects in a loop, or without a target")
    return DownloadError(seen)


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait, from a number or a date."""
    seconds = _number(text)
    if seconds is not None or not text:
        return seconds
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds()) if when.tzinfo else None


def _connection_error(remote: RemoteFile, error: BaseException) -> Exception:
    """The exception for a failed connection: permanent for an invalid certificate, otherwise temporary."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return DownloadError(f"{remote.url}: its certificate isn't valid: {reason.verify_message}")
    return TemporaryFailureError(f"{_host(remote.url)}: {describe(error)}")


def describe(error: BaseException) -> str:
    """Short description of a failed connection."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no response in time"
    if isinstance(reason, http.client.IncompleteRead):
        return "cut off"
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; removes the token for other hosts, and keeps the hub's headers of the redirect."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        self.headers.update({name: value for name, value in headers.items() if name.lower().startswith("x-")})
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise DownloadError(f"{req.full_url}: leads to {newurl}, without encryption; not followed")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and (old.scheme, old.netloc) != (new.scheme, new.netloc):
            following.remove_header("Authorization")
            following.remove_header("Cookie")
        return following


def _opener(redirects: _Redirects) -> urllib.request.OpenerDirector:
    """Opens HTTP and HTTPS through the environment's proxies only: no files, no FTP."""
    opener = urllib.request.OpenerDirector()
    handlers: list[Any] = [
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        redirects,
    ]
    for handler in handlers:
        opener.add_handler(handler)
    return opener
