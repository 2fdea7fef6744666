"""The engine of one node: models with a plan for its devices, and the server's application on them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from edgeinfer.errors import EdgeInferError
from edgeinfer.registry.registry import find_model
from edgeinfer.serving.app import ServerOptions, serving_app
from edgeinfer.serving.models.installed import InstalledModels
from edgeinfer.serving.models.pool import ModelPool
from edgeinfer.serving.transport.local_exchange import post
from edgeinfer_quant_formats.errors import FormatError

FAILURES = (EdgeInferError, FormatError, OSError, ImportError)
"""Errors of loading a model that the user can do something about."""


class NodeEngine:
    """Runs on a node. `model`: of requests that name none, loaded by `ready`; `loading`: keywords of
    `edgeinfer.load`. Which devices a model uses, and how, the node decides from what it has.
    """

    def __init__(self, model: str | None, loading: Mapping[str, Any], options: ServerOptions) -> None:
        self._notes: list[str] = []
        self._model = model
        self._loading = {"parallel": 0, **loading}
        self._options = options
        self._app: Starlette | None = None
        self._lifespan: Any = None

    async def ready(self) -> str:
        """Load the model. Returns "", or why this node can't run it, on one line."""
        try:
            installed = InstalledModels(
                [self._model] if self._model else [], self._loading, self._notes.append
            )
            default = installed.given[0] if self._model else ""
            pool = ModelPool(installed, keep_alive=-1, default=default)
            self._app = serving_app(pool, self._options)
            self._lifespan = self._app.router.lifespan_context(self._app)
            await self._lifespan.__aenter__()
            if self._model:
                (await pool.acquire("")).release()
        except FAILURES as error:
            return " ".join(str(error).split()) or type(error).__name__
        return ""

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of the response to a request."""
        return await post(self.app, path, body)

    @property
    def app(self) -> Starlette:
        """The application, after `ready`."""
        assert self._app is not None, "ready comes first"
        return self._app


def portable_model(name: str | None) -> str | None:
    """The name of a model as nodes find it: a path of this machine becomes an absolute one.

    Raises `EdgeInferError`: there is no such model here.
    """
    if name is None:
        return None
    found = find_model(name)
    return str(Path(found.path).absolute()) if found.source == "path" else found.name
