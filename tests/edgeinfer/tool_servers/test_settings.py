"""The tool servers of the settings file."""

from typing import Any

import pytest

from edgeinfer.errors import SettingError
from edgeinfer.tool_servers.settings import ToolServer, tool_servers


def test_servers_are_read_from_their_tables() -> None:
    table = {
        "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "allow": ["read"], "timeout": 5},
        "web": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer x"}},
    }
    assert tool_servers(table, "config.toml") == [
        ToolServer("files", "npx", ("-y", "x"), {"A": "b"}, None, {}, frozenset({"read"}), 5.0),
        ToolServer("web", url="https://example.com/mcp", headers={"Authorization": "Bearer x"}),
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"a": 1}, "wanted tables [mcp.NAME]"),
        ({"a b": {"command": "x"}}, "saw the name 'a b'"),
        ({"a": {}}, "saw neither, wanted command or url"),
        ({"a": {"command": "x", "url": "http://y"}}, "saw both"),
        ({"a": {"command": " "}}, "wanted a program"),
        ({"a": {"url": "ftp://y"}}, "wanted an address with http or https"),
        ({"a": {"url": "http://y", "args": []}}, "args and env belong to a command"),
        ({"a": {"command": "x", "args": "y"}}, "wanted a list of texts"),
        ({"a": {"command": "x", "env": {"a": 1}}}, "wanted texts by name"),
        ({"a": {"command": "x", "headers": {}}}, "headers belong to a url"),
        ({"a": {"command": "x", "timeout": 0}}, "wanted seconds up to 3600"),
        ({"a": {"command": "x", "alow": []}}, "alow: no such setting"),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_file(table: Any, message: str) -> None:
    with pytest.raises(SettingError, match=r"^config\.toml: mcp") as caught:
        tool_servers(table, "config.toml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
