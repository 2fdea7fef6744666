"""A file that lies on a server, with what is known of it before a byte has come."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RemoteFile:
    """Where a file is to be had. What isn't known yet is None; the server's answer may fill it in."""

    url: str
    name: str
    """The file's name here, with folders of its repository if it lies in one of them."""
    size_bytes: int | None = None
    sha256: str | None = None
    """64 hexadecimal digits."""
    digest_source: str = ""
    """Who says what `sha256` is: "models.toml", "the hub"."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request, and kept from other hosts: a token, the name of this program."""
    login: str = ""
    """What to do where the server wants to know who asks."""
