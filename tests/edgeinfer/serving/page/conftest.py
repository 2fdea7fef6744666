"""A page of a real server in headless Chromium; the tests are skipped where there is none."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import Model
from edgeinfer.tool_servers.client import ToolServers
from edgeinfer.tool_servers.settings import ToolServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROGRAM = str(Path(__file__).parents[2] / "tool_servers" / "stdio_server.py")
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Not of the session: Playwright's event loop would hinder other tests' loops."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def tools() -> Iterator[ToolServers]:
    """The tools of a small server; one of them is called without a question."""
    pytest.importorskip("mcp")
    servers = ToolServers([ToolServer("test", sys.executable, (PROGRAM,), allow=frozenset({"echo"}))])
    servers.start()
    assert servers.warnings == []
    yield servers
    servers.close()


class Watched:
    """A tab, and what it did that it must not do."""

    def __init__(self, tab: Any, root: str) -> None:
        self.tab, self.root = tab, root
        self.outside: list[str] = []
        self.errors: list[str] = []
        tab.add_init_script(WATCH)
        tab.on("request", self._request)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", self._console)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.root, "blob:")):
            self.outside.append(request.url)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "401" not in message.text:
            self.errors.append(message.text)

    def check(self) -> None:
        assert self.outside == []
        assert self.errors == []
        assert self.tab.evaluate("window.violations") == []


OpenPage = Callable[..., Any]


@contextmanager
def opening(browser: Any, folder: Path) -> Iterator[OpenPage]:
    """(model, options of the server and of the tab) -> a tab with the page, which is checked at the end:
    no request to another server, no error, no violation of the policy.
    """
    from edgeinfer.serving.page.page import Page
    from tests.edgeinfer.serving.http_client import served

    with ExitStack() as ended:

        def opened(
            model: Model, tab: dict[str, Any] | None = None, tools: ToolServers | None = None, **options: Any
        ) -> Any:
            page = Page(folder / "chats.sqlite", tools=tools)
            root = ended.enter_context(served(model, page=page, **options))
            context = browser.new_context(**(tab or {}))
            ended.callback(context.close)
            watched = Watched(context.new_page(), root)
            ended.callback(watched.check)
            watched.tab.set_default_timeout(20_000)
            watched.tab.goto(root)
            watched.tab.wait_for_selector(".welcome, dialog")
            return watched.tab

        yield opened


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """As `opening`, of one test."""
    with opening(browser, tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def open_pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPage]:
    """As `opening`, of all tests of a file."""
    with opening(browser, tmp_path_factory.mktemp("page")) as opened:
        yield opened
