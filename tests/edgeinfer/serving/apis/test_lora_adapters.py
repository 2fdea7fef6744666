"""The path of LoRA adapters: their scales are changed while the server runs."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import edgeinfer
from edgeinfer import Model
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.lora.random_adapters import write_adapter
from tests.edgeinfer.serving.http_client import JSON, client, fake

PATH = "/lora-adapters"
COMPLETION = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "logprobs": 1}


@pytest.fixture
def model(zoo_file: ZooFile, tmp_path: Path) -> Any:
    first = write_adapter(zoo_file("llama"), tmp_path / "first.gguf")
    second = write_adapter(zoo_file("llama"), tmp_path / "second.gguf", seed=3)
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "draft": None, "parallel": 2}
    with edgeinfer.load(zoo_file("llama"), lora=[first, (second, 0.0)], **options) as opened:
        yield opened


async def completed(http: Any) -> str:
    response = await http.post("/v1/completions", content=json.dumps(COMPLETION), headers=JSON)
    assert response.status_code == 200
    return str(response.json()["choices"][0])


async def put(http: Any, body: Any) -> Any:
    return await http.post(PATH, content=json.dumps(body), headers=JSON)


@pytest.mark.anyio
async def test_scales_are_listed_and_changed(model: Model) -> None:
    async with client(model, response_cache=4) as http:
        listed = (await http.get(PATH)).json()
        assert [(each["id"], Path(each["path"]).name, each["scale"]) for each in listed] == [
            (0, "first.gguf", 1.0),
            (1, "second.gguf", 0.0),
        ]
        first = await completed(http)
        changed = await put(http, [{"id": 1, "scale": 0.5}])
        assert [each["scale"] for each in changed.json()] == [0.0, 0.5]
        second = await completed(http)
        await put(http, [{"id": 0, "scale": 1}])
        assert await completed(http) == first != second


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the body: saw {}, wanted a list of"),
        ([1], "the body: saw 1, wanted a list of"),
        ([{"id": 2, "scale": 1}], "id: saw 2, wanted 0 to 1"),
        ([{"id": 0, "scale": "1"}], "scale: saw '1', wanted a number"),
        ([{"id": 0, "scale": 1e999}], "Infinity"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "id: saw 0, wanted the number of an adapter, once"),
        ([{"id": 0, "path": "/etc/passwd"}], "path: no such field"),
    ],
)
async def test_other_bodies_are_refused(model: Model, body: Any, message: str) -> None:
    before = model.lora
    async with client(model) as http:
        response = await put(http, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert model.lora == before


@pytest.mark.anyio
async def test_a_server_without_adapters_lists_none() -> None:
    async with client(fake()) as http:
        assert (await http.get(PATH)).json() == []
        response = await put(http, [{"id": 0, "scale": 1}])
    assert "wanted none: the server was started without --lora" in response.json()["error"]["message"]
