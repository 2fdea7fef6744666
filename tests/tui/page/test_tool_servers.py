"""The tool servers of the settings file, for `edgeinfer serve --mcp` and for every command."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.kernels.system.marks import NEEDS_SIGNALS
from tests.tui.conftest import CommandLine

PROGRAM = [sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()"]
SERVER = Path(__file__).parents[2] / "edgeinfer" / "tool_servers" / "stdio_server.py"


def config(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.slow
@NEEDS_SIGNALS
def test_serve_offers_the_tools_of_the_settings_file(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    file = config(
        tmp_path,
        f"temperature = 0\n[mcp.test]\ncommand = {json.dumps(sys.executable)}\n"
        f"args = [{json.dumps(str(SERVER))}]\n"
        '[mcp.gone]\ncommand = "/no/such/program"\n',
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"EDGEINFER_CONFIG": str(file), "XDG_STATE_HOME": str(tmp_path)}
    options = ("--port", "0", "--device", "cpu", "--draft", "none", "--mcp", "--key", "secret")
    process = subprocess.Popen(
        [*PROGRAM, "serve", "tiny", *options], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    output = ""
    while not (found := re.search(r"browsers is at (http\S+/)\n", output)):
        line = process.stderr.readline()
        assert line, output
        output += line
    tools = urllib.request.Request(f"{found[1]}page/tools", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(tools, timeout=30) as reply:
        listed = json.load(reply)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert "test__add" in [tool["function"]["name"] for tool in listed["tools"]]
    assert output.startswith("edgeinfer: tool server gone: ")
    assert process.returncode == 0


def test_without_a_server_in_the_settings_mcp_is_an_error(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_CONFIG", str(config(tmp_path, "")))
    outcome = edgeinfer("serve", "--mcp", "--port", "0", "--key", "secret")
    assert outcome.code == 1
    assert "--mcp: saw no [mcp.NAME] in" in outcome.err
    assert edgeinfer("serve", "--mcp", "--no-page").code == 2
    refused = edgeinfer("serve", "--mcp")
    assert refused.code == 2
    assert "any program of this machine could call the tools; give a --key too" in refused.err


def test_config_lists_the_servers(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(
        tmp_path, '[mcp.a]\ncommand = "npx"\nargs = ["-y", "two words"]\n[mcp.b]\nurl = "http://x/mcp"\n'
    )
    monkeypatch.setenv("EDGEINFER_CONFIG", str(file))
    out = edgeinfer("config").out
    assert "npx -y 'two words'" in out
    assert "http://x/mcp" in out


def test_a_wrong_server_is_one_line_with_the_file(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(tmp_path, "[mcp.test]\nurl = 3\n")
    monkeypatch.setenv("EDGEINFER_CONFIG", str(file))
    outcome = edgeinfer("run", "tiny", "Hi")
    assert outcome.code == 1
    assert outcome.err.strip().endswith(f"{file}: mcp.test.url: saw 3, wanted an address with http or https")
