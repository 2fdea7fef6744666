"""Imports Ray on demand, and connects to a cluster."""

import logging
import socket
from typing import Any

from edgeinfer.errors import EdgeInferError, SettingError, shown

AUTO = "auto"
CONNECT_SECONDS = 10.0
INSTALL = "pip install 'edgeinfer[ray]', on every node"


def ray_library(requested_by: str) -> Any:
    """The module `ray`; `requested_by` is the option that needs it. Raises `EdgeInferError`: it isn't
    installed.
    """
    try:
        import ray
    except ImportError as error:
        raise EdgeInferError(f"{requested_by} needs Ray: {INSTALL}") from error
    return ray


def connected(address: str, requested_by: str) -> Any:
    """The module `ray`, connected to the cluster at an address: HOST:PORT, or "auto" on one of its nodes.

    Raises:
        EdgeInferError: Ray isn't installed, or there is no cluster.
    """
    ray = ray_library(requested_by)
    host, _, port = str(address).rpartition(":")
    if address != AUTO and not (host and port.isdecimal() and "/" not in host):
        raise SettingError(
            f'{requested_by}: saw {shown(address)}, wanted HOST:PORT of the head node, or "auto" on a node'
        )
    if ray.is_initialized():
        return ray
    try:
        if address != AUTO:  # Ray tries for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EdgeInferError(
            f"{requested_by} {address}: no Ray cluster there ({reason}); if it needs a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    return ray
