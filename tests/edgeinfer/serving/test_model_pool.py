"""Several models within one memory budget: loaded on request, unloaded when idle or least recently used."""

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from edgeinfer import Model
from edgeinfer.errors import OutOfMemoryError
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.models.installed import InstalledModels
from edgeinfer.serving.models.pool import ModelPool
from tests.edgeinfer.fake_engine import FakeEngine, model_on
from tests.edgeinfer.serving.http_client import HELLO, client, scripted_after_any

pytestmark = pytest.mark.anyio


class FakeSource:
    """Models a, b, c and "big:Q8_0", of which `room` fit memory; it records what is loaded."""

    def __init__(self, room: int = 1) -> None:
        names = ("a", "b", "c", "big:Q8_0")
        self.room = room
        self.known = {name: ModelFile(name, Path(f"/nowhere/{name}.gguf"), "path") for name in names}
        self.loads: list[str] = []
        self.models: dict[str, Model] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.scans = 0

    def files(self, refresh: bool = False) -> Mapping[str, ModelFile]:
        self.scans += refresh
        return self.known

    def fits_with(self, file: ModelFile, loaded: Collection[Model]) -> bool:
        return len(loaded) < self.room

    def load(self, file: ModelFile, loaded: Collection[Model]) -> Model:
        assert self.gate.wait(10)
        if file.name == "c":
            raise OutOfMemoryError("c: too large")
        self.loads.append(file.name)
        model = model_on(FakeEngine(scripted_after_any("Yes."), 512))
        model.name = file.name
        self.models[file.name] = model
        return model


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError


async def test_a_model_is_loaded_once_for_all_requests() -> None:
    source = FakeSource()
    pool = ModelPool(source)
    leases = await asyncio.gather(*(pool.acquire("a") for _ in range(4)))
    assert source.loads == ["a"]
    assert {lease.model.name for lease in leases} == {"a"}
    states = {card.name: card.state for card in await pool.cards()}
    assert states == {"a": "loaded", "b": "not loaded", "c": "not loaded", "big:Q8_0": "not loaded"}
    await pool.close()


@pytest.mark.slow
async def test_a_load_waits_for_running_requests_and_then_unloads_the_model() -> None:
    source = FakeSource()
    pool = ModelPool(source)
    first = await pool.acquire("a")
    waiting = asyncio.create_task(pool.acquire("b"))
    while {card.name: card.state for card in await pool.cards()}["a"] != "unloading":
        assert not waiting.done()
    later = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(0)
    assert source.loads == ["a"]
    assert not source.models["a"].engine.closed  # type: ignore[attr-defined]
    first.release()
    second = await waiting
    assert (second.model.name, list(pool.loaded)) == ("b", ["b"])
    second.release()
    assert (await later).model.name == "a"
    assert source.loads == ["a", "b", "a"]
    await pool.close()


@pytest.mark.slow
async def test_the_idle_model_that_was_used_least_recently_leaves() -> None:
    source = FakeSource(room=2)
    pool = ModelPool(source)
    for name in ("a", "b", "a"):
        (await pool.acquire(name)).release()
    (await pool.acquire("big")).release()
    assert sorted(pool.loaded) == ["a", "big:Q8_0"]
    busy = await pool.acquire("a")
    (await pool.acquire("b")).release()
    assert sorted(pool.loaded) == ["a", "b"]
    busy.release()
    await pool.close()


async def test_an_idle_model_is_unloaded_after_its_time() -> None:
    source = FakeSource(room=4)
    pool = ModelPool(source, keep_alive=0)
    lease = await pool.acquire("a")
    (await pool.acquire("b", keep_alive=-1)).release()
    await asyncio.sleep(0)
    assert "a" in pool.loaded
    lease.release()
    await eventually(lambda: list(pool.loaded) == ["b"])
    cards = {card.name: card for card in await pool.cards()}
    assert cards["b"].expires is None
    (await pool.acquire("b", keep_alive=100)).release()
    assert {card.name: card for card in await pool.cards()}["b"].expires is not None
    await pool.close()


async def test_after_a_load_without_room_others_are_loaded() -> None:
    pool = ModelPool(FakeSource())
    with pytest.raises(OutOfMemoryError, match="too large"):
        await pool.acquire("c")
    assert (await pool.acquire("a")).model.name == "a"
    await pool.close()


async def test_a_client_that_leaves_does_not_end_the_load() -> None:
    source = FakeSource()
    source.gate.clear()
    pool = ModelPool(source, keep_alive=-1)
    leaving = asyncio.create_task(pool.acquire("a"))
    staying = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(0.01)
    leaving.cancel()
    source.gate.set()
    assert (await staying).model.name == "a"
    assert source.loads == ["a"]
    await pool.close()


async def test_names_are_resolved() -> None:
    source = FakeSource(room=4)
    pool = ModelPool(source)
    with pytest.raises(RequestError, match="model: saw none, wanted one of 'a', 'b'"):
        await pool.acquire("")
    assert (await pool.acquire("big")).model.name == "big:Q8_0"
    assert (await pool.acquire("")).model.name == "big:Q8_0"
    assert (await ModelPool(source, default="b").acquire("")).model.name == "b"
    for name in ("x", "/nowhere/a.gguf", "../a"):
        with pytest.raises(RequestError, match="isn't here; this server has 'a', 'b'") as raised:
            await pool.acquire(name)
        assert raised.value.status == 404
    assert source.scans == 4
    await pool.close()


async def test_requests_for_several_models_are_completed() -> None:
    source = FakeSource()
    pool: Any = ModelPool(source)
    async with client(pool) as http:
        bodies = [{"model": name, "messages": HELLO, "temperature": 0} for name in ("a", "b", "a", "b")]
        replies = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
        unknown = await http.post("/v1/chat/completions", json={"model": "x", "messages": HELLO})
        listed = (await http.get("/v1/models")).json()["data"]
        failed = await http.post("/v1/chat/completions", json={"model": "c", "messages": HELLO})
    assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == ["Yes."] * 4
    assert [reply.json()["model"] for reply in replies] == ["a", "b", "a", "b"]
    assert unknown.status_code == 404
    assert {each["id"]: each["state"] for each in listed}.keys() == source.known.keys()
    assert (failed.status_code, failed.json()["error"]["message"]) == (503, "c: too large")
    await pool.close()


async def test_installed_models_are_loaded_by_plan() -> None:
    notes: list[str] = []
    installed = InstalledModels(["tiny"], {"device": "cpu", "draft": None, "ram": "1GiB"}, notes.append)
    pool = ModelPool(installed, default=installed.given[0])
    lease = await pool.acquire("")
    assert (lease.model.name, notes) == ("tiny", ["loading tiny"])
    file = installed.files()["tiny"]
    assert installed.fits_with(file, [lease.model])
    small = InstalledModels(["tiny"], {"device": "cpu", "draft": None, "ram": "60 MiB"}, notes.append)
    assert not small.fits_with(file, [lease.model])
    lease.release()
    await pool.close()
