"""A file on a server, with its known properties."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
