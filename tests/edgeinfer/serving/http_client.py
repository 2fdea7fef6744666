"""The OpenAI-compatible server over a fake model, requested without a network."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import httpx

from edgeinfer import Model
from edgeinfer.serving.app import ServerOptions, serving_app
from tests.edgeinfer.fake_engine import FakeEngine, model_on, scripted
from tests.random_models import CHAT_TEMPLATE

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
TOOL_TEMPLATE = "{{ tools }}" + CHAT_TEMPLATE
HELLO = [{"role": "user", "content": "Hi"}]
Fields = dict[str, Any]


def scripted_after_any(text: str) -> Callable[[list[int]], np.ndarray]:
    """Logits for this text after a prompt of any length."""
    started: list[int] = []

    def completion(ids: list[int]) -> np.ndarray:
        if not started or len(ids) < started[0]:
            started[:] = [len(ids)]
        return scripted(text, started[0])(ids)

    return completion


def fake(text: str = "The fox is here.", context: int = 512, template: str = CHAT_TEMPLATE) -> Model:
    return model_on(FakeEngine(scripted_after_any(text), context), template)


@asynccontextmanager
async def client(model: Model, **options: Any) -> AsyncIterator[Any]:
    app = serving_app(model, ServerOptions(**options))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as result:
        yield result


async def post(model: Model, path: str, body: Any, **options: Any) -> Any:
    async def ask() -> Any:
        async with client(model, **options) as http:
            return await http.post(path, content=json.dumps(body), headers=JSON)

    return await ask()


def events(text: str) -> list[Any]:
    result = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert result[-1] == "[DONE]"
    return [json.loads(line) for line in result[:-1]]


async def chat(body: Fields, model: Model | None = None, **options: Any) -> Any:
    return await post(
        model or fake(), "/v1/chat/completions", {"messages": HELLO, "temperature": 0, **body}, **options
    )


@contextmanager
def served(models: Any, **options: Any) -> Iterator[str]:
    """The address of a real server on a free port of this machine."""
    pytest.importorskip("uvicorn")
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's looks every tenth of a second whether it ends, and waits another one for connections."""

        async def main_loop(self) -> None:
            await self.on_tick(0)
            while not self.should_exit:
                await asyncio.sleep(0.005)

        async def shutdown(self, sockets: Any = None) -> None:
            for server in self.servers:
                server.close()
            for connection in list(self.server_state.connections):
                connection.shutdown()
            while self.server_state.connections or self.server_state.tasks:
                await asyncio.sleep(0.005)
            await self.lifespan.shutdown()

    server = Server(
        uvicorn.Config(
            serving_app(models, ServerOptions(**options)), host="127.0.0.1", port=0, log_level="error"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.001)
        assert thread.is_alive()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
