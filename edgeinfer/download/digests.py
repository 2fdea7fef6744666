"""SHA-256 digests in the headers of servers' responses."""

import base64
import binascii
import re
from collections.abc import Mapping

HEX = re.compile(r"[0-9a-f]{64}")


def digest_in(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """The sha256 in a response's headers and the name of its header, or None.

    `X-Linked-Etag` is the hub's, hexadecimal between quotes. `Repr-Digest` (RFC 9530) is `sha-256=:base64:`
    of the whole file, also in a response to a range. The older `Digest` (RFC 3230) is not used, because
    servers give the digest of the range in it.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    linked = hexadecimal(lower.get("x-linked-etag", ""))
    if linked:
        return linked, "X-Linked-Etag"
    match = re.search(r"(?:^|[\s,])sha-256=:([A-Za-z0-9+/=]+):", lower.get("repr-digest", ""))
    if match:
        try:
            raw = base64.b64decode(match[1], validate=True)
        except binascii.Error:
            return None
        if len(raw) == 32:
            return raw.hex(), "Repr-Digest"
    return None


def hexadecimal(text: str) -> str | None:
    """The sha256 in an entity tag or a field, in lower case; None: another value."""
    plain = text.strip().removeprefix("W/").strip('"').removeprefix("sha256:").lower()
    return plain if HEX.fullmatch(plain) else None


def strong_tag(tag: str | None) -> str | None:
    """An entity tag that is valid in `If-Range` (RFC 9110, 13.1.5); None: there is none, or a weak one."""
    return tag if tag and tag.startswith('"') else None
