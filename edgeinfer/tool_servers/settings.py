"""The tool servers of the settings file: `[mcp.NAME]` with a command or an address."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edgeinfer.errors import SettingError, shown

TABLE = "mcp"
CALL_SECONDS = 60.0
MAX_SECONDS = 3600.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_KEYS = ("command", "args", "env", "url", "headers", "allow", "timeout")


@dataclass(frozen=True)
class ToolServer:
    """One server: a program that talks over its standard input and output, or a streamable-HTTP `url`.

    `env`: variables added to a small environment (PATH, HOME and a few more). `headers`: of every request to
    `url`. `allow`: tools that are called without a question. `timeout`: seconds for a call.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    allow: frozenset[str] = frozenset()
    timeout: float = CALL_SECONDS

    @property
    def target(self) -> str:
        """The address, or the command line."""
        return self.url or shlex.join([self.command or "", *self.args])


def tool_servers(table: Any, origin: str) -> list[ToolServer]:
    """The servers of the table `mcp` of a settings file. Raises `SettingError`; `origin` names the file."""
    if not isinstance(table, Mapping) or not all(isinstance(one, Mapping) for one in table.values()):
        raise SettingError(f"{origin}: {TABLE}: saw {shown(table)}, wanted tables [mcp.NAME]")
    return [_server(str(name), values, f"{origin}: {TABLE}.{name}") for name, values in table.items()]


def _server(name: str, values: Mapping[str, Any], where: str) -> ToolServer:
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"{where}: saw the name {shown(name)}, wanted letters, digits, - and _, 32 at most"
        )
    for key in values:
        if key not in _KEYS:
            raise SettingError(f"{where}: {key}: no such setting; it has {', '.join(_KEYS)}")
    command, url = values.get("command"), values.get("url")
    if (command is None) == (url is None):
        raise SettingError(f"{where}: saw {'both' if command else 'neither'}, wanted command or url")
    if command is not None and (not isinstance(command, str) or not command.strip()):
        raise SettingError(f"{where}.command: saw {shown(command)}, wanted a program")
    if url is not None and not (isinstance(url, str) and urlsplit(url).scheme in ("http", "https")):
        raise SettingError(f"{where}.url: saw {shown(url)}, wanted an address with http or https")
    if url is not None and ("args" in values or "env" in values):
        raise SettingError(f"{where}: args and env belong to a command; leave them out with a url")
    if command is not None and "headers" in values:
        raise SettingError(f"{where}: headers belong to a url; leave them out with a command")
    return ToolServer(
        name,
        command,
        tuple(_texts(values.get("args", []), f"{where}.args")),
        _variables(values.get("env", {}), f"{where}.env"),
        url,
        _variables(values.get("headers", {}), f"{where}.headers"),
        frozenset(_texts(values.get("allow", []), f"{where}.allow")),
        _seconds(values.get("timeout", CALL_SECONDS), f"{where}.timeout"),
    )


def _texts(value: Any, where: str) -> Sequence[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise SettingError(f"{where}: saw {shown(value)}, wanted a list of texts")
    return value


def _variables(value: Any, where: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for one in value.values()):
        raise SettingError(f"{where}: saw {shown(value)}, wanted texts by name")
    return dict(value)


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SECONDS:
        raise SettingError(f"{where}: saw {shown(value)}, wanted seconds up to {MAX_SECONDS:g}")
    return float(value)
