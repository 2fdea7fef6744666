"""The address of the server, and whether other machines can reach it."""

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from edgeinfer.errors import SettingError


AnyAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def listening(host: str, port: int, key: str | None) -> tuple[socket.socket, bool]:
    """A listening socket, and whether it listens on all addresses.

    Raises:
        SettingError: the address can't be resolved or listened on.
        typer.BadParameter: other machines can reach it, and no key is set.
    """
    (family, _, _, _, address), addresses = resolved_address(host, port, key)
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        raise _failure(host, port, error) from error
    return bound, addresses[0].is_unspecified


def resolved_address(host: str, port: int, key: str | None) -> tuple[Any, list[AnyAddress]]:
    """What the host's name stands for, the first as `getaddrinfo` has it. Raises: as `listening`."""
    if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
        raise typer.BadParameter("--key: wanted printable ASCII characters, at least one")
    try:
        resolved = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, ValueError) as error:
        raise _failure(host, port, error) from error
    addresses = [ipaddress.ip_address(str(each[4][0]).split("%")[0]) for each in resolved]
    if key is None and not all(map(_is_loopback, addresses)):
        raise typer.BadParameter(
            f"--host {host} is reachable from the whole network; give a --key, or --host 127.0.0.1"
        )
    return resolved[0], addresses


def _is_loopback(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _failure(host: str, port: int, error: Exception) -> "SettingError":
    from edgeinfer.errors import SettingError  # only after a failure, so that `--help` stays fast

    reason = getattr(error, "strerror", None) or str(error)
    return SettingError(f"{host}:{port}: can't listen there ({reason}); another --port, or 0 for a free one")
