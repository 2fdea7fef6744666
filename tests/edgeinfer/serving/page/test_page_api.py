"""The page's files and the JSON API of the chat store, requested without a network."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from edgeinfer import Model
from edgeinfer.history.store import ChatStore
from edgeinfer.serving.page.page import Page
from edgeinfer.tool_servers.client import ToolServers
from tests.edgeinfer.serving.http_client import HELLO, JSON, client, events, fake

pytestmark = pytest.mark.anyio
PARSERS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(")
STATIC = Path(__file__).parents[4] / "edgeinfer/serving/page/static"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite"


@asynccontextmanager
async def page_client(path: Path, model: Model | None = None, **options: Any) -> AsyncIterator[Any]:
    page = Page(path)
    async with client(model or fake(), page=page, **options) as http:
        yield http
    await page.close()


async def new_chat(http: Any, text: str = "Hello") -> tuple[int, int]:
    """A chat and its first message."""
    chat = (await http.post("/page/chats", json={"model": "fake", "system": "Be brief."})).json()["id"]
    sent = await http.post(f"/page/chats/{chat}/messages", json={"role": "user", "content": text})
    assert sent.status_code == 201
    return chat, sent.json()["id"]


async def test_the_page_loads_only_files_of_this_server(path: Path) -> None:
    async with page_client(path) as http:
        index = await http.get("/")
        policy = index.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert index.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", index.text)
        for address in re.findall(r'(?:src|href)="([^"#]+)"', index.text):
            assert (await http.get(address)).status_code == 200, address
        assert (await http.get("/page/static/main.js")).headers["content-type"].startswith("text/javascript")
        for name in ("nothing.js", "__init__.py", "..%2fpage.py", "%2e%2e%2fpage.py"):
            assert (await http.get(f"/page/static/{name}")).status_code == 404


def test_no_script_of_the_page_parses_html_or_names_another_server() -> None:
    for file in STATIC.rglob("*.js"):
        text = file.read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text
        )
        assert not re.search(r"https?://\w", text), file.name
        imported = re.findall(r'from "([^"]+)"', text)
        assert all((file.parent / name).is_file() for name in imported), file.name


async def test_a_server_without_the_page_has_none_of_its_paths() -> None:
    async with client(fake()) as http:
        assert (await http.get("/")).status_code == 404
        assert (await http.get("/page/chats")).status_code == 404


async def test_messages_of_the_page_are_those_of_the_terminal_chat(path: Path) -> None:
    async with page_client(path) as http:
        chat, first = await new_chat(http, "Hi @a.txt\n\na.txt:\n```txt\nfoxes\n```")
        started = {"role": "assistant", "content": "", "state": "coming", "parent": first}
        response = (await http.post(f"/page/chats/{chat}/messages", json=started)).json()
        call = {"name": "f", "arguments": {"x": 1}}
        update = {"reasoning": "Hm.", "content": "Yes.", "calls": [call], "state": "whole"}
        saved = await http.put(f"/page/messages/{response['id']}", json=update)
        assert {**saved.json(), **update} == saved.json()
        assert (await http.put(f"/page/messages/{response['id']}", json=update)).status_code == 400
        read = (await http.get(f"/page/chats/{chat}")).json()
        assert [one["content"] for one in read["tree"]][1] == "Yes."
        assert (read["tree"][0]["written"], read["title"]) == ("Hi @a.txt", "Hi @a.txt")
    with ChatStore(path) as store:
        stored = store.chat(str(chat))
        texts = [one.text for one in store.branch(stored)]
    assert (stored.model, stored.system) == ("fake", "Be brief.")
    assert texts[1].startswith("<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n")


async def test_branches_names_exports_searches_and_deletion(path: Path) -> None:
    async with page_client(path) as http:
        chat, first = await new_chat(http, "Foxes?")
        other = (
            await http.post(f"/page/chats/{chat}/messages", json={"role": "user", "content": "Owls?"})
        ).json()
        one = f"/page/chats/{chat}"
        assert (await http.get(one)).json()["tip"] == other["id"]
        assert (await http.patch(one, json={"tip": first, "name": "animals"})).json()["tip"] == first
        assert (await http.patch(one, json={"system": ""})).json()["system"] is None
        assert [each["name"] for each in (await http.get("/page/chats")).json()["chats"]] == ["animals"]
        (hit,) = (await http.get("/page/chats?search=owls")).json()["chats"]
        assert (hit["id"], hit["found"], hit["excerpt"]) == (chat, other["id"], "Owls?")
        assert "Foxes?" in (await http.get(f"{one}/export")).text
        lines = (await http.get(f"{one}/export?format=jsonl")).text.splitlines()
        assert json.loads(lines[1])["content"] == "Foxes?"
        assert (await http.get(f"{one}/export?format=exe")).status_code == 400
        assert (await http.delete(one)).status_code == 200
        assert (await http.get(one)).status_code == 404


@pytest.mark.parametrize(
    ("method", "address", "body", "status"),
    [
        ("POST", "/page/chats", {"modle": "x"}, 400),
        ("POST", "/page/chats/99/messages", {"role": "user", "content": "a"}, 404),
        ("POST", "/page/chats/1/messages", {"role": "user", "content": " "}, 400),
        ("POST", "/page/chats/1/messages", {"role": "system", "content": "a"}, 400),
        ("POST", "/page/chats/1/messages", {"role": "user", "content": "a", "parent": "x"}, 400),
        ("POST", "/page/chats/1/messages", {"role": "user", "content": "a", "parent": 77}, 400),
        ("POST", "/page/chats/1/messages", {"role": "assistant", "content": "a", "calls": [1]}, 400),
        ("PUT", "/page/messages/77", {"content": "a"}, 400),
        ("PUT", f"/page/messages/{10**30}", {"content": "a"}, 404),
        ("PATCH", "/page/chats/1", {"name": "12"}, 400),
        ("PATCH", "/page/chats/1", {"tip": 77}, 400),
        ("GET", f"/page/chats/{10**30}", None, 404),
    ],
)
async def test_a_bad_request_gets_one_line(
    path: Path, method: str, address: str, body: Any, status: int
) -> None:
    async with page_client(path) as http:
        await new_chat(http)
        headers = JSON if body is not None else {}
        content = None if body is None else json.dumps(body)
        reply = await http.request(method, address, content=content, headers=headers)
    assert reply.status_code == status
    message = reply.json()["error"]["message"]
    assert message
    assert "\n" not in message


async def test_the_key_guards_chats_but_not_the_files(path: Path) -> None:
    async with page_client(path, key="secret") as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.get("/page/static/main.js")).status_code == 200
        for address in ("/page/state", "/page/chats", "/page/chats/1", "/page/plan?model=fake"):
            assert (await http.get(address)).status_code == 401
        refused = await http.post("/page/completions", json={"messages": HELLO})
        assert refused.status_code == 401
        allowed = await http.get("/page/chats", headers={"Authorization": "Bearer secret"})
        assert allowed.json() == {"chats": []}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_other_origins_are_refused(path: Path, headers: dict[str, str], method: str) -> None:
    async with page_client(path) as http:
        chat, _ = await new_chat(http)
        address = {"POST": "/page/chats", "PUT": "/page/messages/1"}.get(method, f"/page/chats/{chat}")
        reply = await http.request(method, address, content="{}", headers={**JSON, **headers})
        assert reply.status_code in (400, 403)
        assert (await http.get(f"/page/chats/{chat}")).status_code == 200


@pytest.mark.parametrize(
    ("method", "address"), [("POST", "/page/chats"), ("PUT", "/page/messages/1"), ("PATCH", "/page/chats/1")]
)
async def test_bodies_that_forms_can_send_are_refused(path: Path, method: str, address: str) -> None:
    async with page_client(path) as http:
        reply = await http.request(method, address, content="{}", headers={"Content-Type": "text/plain"})
    assert reply.status_code == 415


async def test_a_completion_is_streamed_with_its_speed_and_cut_to_the_context(path: Path) -> None:
    async with page_client(path, fake("It is here.", context=64)) as http:
        messages = [*HELLO, {"role": "assistant", "content": "x" * 50}, *HELLO]
        reply = await http.post("/page/completions", json={"messages": messages, "temperature": 0})
        refused = await http.post("/page/completions", json={"messages": messages, "tempreature": 0})
    *pieces, end = events(reply.text)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces) == "It is here."
    assert (end["dropped_messages"], end["context"], end["finish"]) == (2, 64, "stop")
    assert end["timings"]["seconds_to_first_token"] >= 0
    assert refused.status_code == 400


async def test_the_state_names_the_models_and_what_the_page_opens_with(path: Path) -> None:
    page = Page(path, system="Be brief.", settings={"temperature": 0.5})
    async with client(fake(), page=page) as http:
        state = (await http.get("/page/state")).json()
        plan = (await http.get("/page/plan?model=fake")).json()
        unknown = (await http.get("/page/plan?model=other")).json()
    await page.close()
    assert [one["name"] for one in state["models"]] == ["fake"]
    assert (state["system"], state["settings"]) == ("Be brief.", {"temperature": 0.5})
    assert plan["plan"]["verdict"] == "another engine places the bytes"
    assert unknown == {"plan": None}


async def test_a_damaged_store_is_an_error_and_then_a_new_one(path: Path) -> None:
    async with page_client(path) as http:
        await new_chat(http)
    path.write_bytes(b"no database" * 1000)
    async with page_client(path) as http:
        assert (await http.get("/page/chats")).json() == {"chats": []}


async def test_requests_of_the_store_are_not_logged(path: Path) -> None:
    lines: list[str] = []
    log: Callable[[str], None] = lines.append
    async with page_client(path, log=log) as http:
        await new_chat(http)
        await http.get("/")
        await http.post("/page/completions", json={"messages": HELLO})
    assert [line.split()[1] for line in lines] == ["/", "/page/completions"]


async def test_the_tools_and_a_call_over_http(tools: ToolServers, tmp_path: Path) -> None:
    page = Page(tmp_path / "chats.sqlite", tools=tools)
    async with client(fake(), page=page, key="secret") as http:
        http.headers["Authorization"] = "Bearer secret"
        listed = (await http.get("/page/tools")).json()
        assert "test__add" in [tool["function"]["name"] for tool in listed["tools"]]
        assert listed["allowed"] == ["test__echo"]
        call = {"name": "test__add", "arguments": {"a": 2, "b": 3}}
        assert (await http.post("/page/tools/call", json=call)).json() == {"content": "5", "failed": False}
        assert (await http.post("/page/tools/call", json={**call, "name": "rm"})).status_code == 404
        assert (await http.post("/page/tools/call", json={**call, "arguments": []})).status_code == 400
        foreign = await http.post("/page/tools/call", json=call, headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 403
        http.headers["Authorization"] = ""
        assert (await http.post("/page/tools/call", json=call)).status_code == 401
    await page.close()
