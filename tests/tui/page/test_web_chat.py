"""`edgeinfer chat --web`: the server for one user, its address, and the options that the page takes."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from edgeinfer.history.store import ChatStore
from edgeinfer_tui.commands.web_chat import has_browser
from tests.kernels.system.marks import NEEDS_SIGNALS
from tests.tui.conftest import CommandLine

PROGRAM = [sys.executable, "-c", "from edgeinfer_tui.command_line import main; main()"]


@pytest.mark.slow
@NEEDS_SIGNALS
def test_the_address_has_the_key_and_the_chat(tmp_path: Path) -> None:
    with ChatStore(tmp_path / "edgeinfer" / "chats.sqlite") as store:
        chat = store.new_chat("tiny", name="foxes")
        store.add_message(chat.id, None, "user", "Where?")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"XDG_STATE_HOME": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": "", "BROWSER": "true"}
    options = ("--session", "foxes", "--system", "Be brief.", "--temperature", "0", "--device", "cpu")
    process = subprocess.Popen(
        [*PROGRAM, "chat", "--web", "--draft", "none", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stderr is not None
    output = ""
    while not (found := re.search(r"(http://127[\d.:]+/)#key=([\w-]+)&chat=1\n", output)):
        line = process.stderr.readline()
        assert line, output
        output += line
    state = urllib.request.Request(f"{found[1]}page/state", headers={"Authorization": f"Bearer {found[2]}"})
    with urllib.request.urlopen(state, timeout=30) as reply:
        opened = json.load(reply)
    assert (opened["system"], opened["settings"]) == ("Be brief.", {"temperature": 0.0})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{found[1]}page/state", timeout=30)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=20)
    assert rest.endswith("edgeinfer: ended\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--private",), "--private saves no chat, but the page saves all; drop --private or --web"),
        (("--schema", "{}"), "--schema"),
    ],
)
def test_options_that_the_page_has_not_are_refused(
    edgeinfer: CommandLine, options: tuple[str, ...], message: str
) -> None:
    outcome = edgeinfer("chat", "--web", *options)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="there is always a screen")
def test_without_a_screen_there_is_no_browser() -> None:
    assert not has_browser({})
