"""The models of a server, and the leases with which requests use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from edgeinfer.errors import shown
from edgeinfer.model import Model
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.serving.fields import RequestError

State = Literal["loaded", "loading", "unloading", "not loaded"]


@dataclass(frozen=True)
class ModelCard:
    """A model that requests may name. `context`: None until it is loaded; `expires`: seconds since the epoch
    at which an idle model is unloaded.
    """

    name: str
    state: State
    context: int | None = None
    path: Path | None = None
    size_bytes: int = 0
    loaded_bytes: int = 0
    gpu_bytes: int = 0
    parallel: int | None = None
    cache_bytes: int | None = None
    parameters: str = ""
    modified: float = 0.0
    expires: float | None = None
    is_path: bool = False
    """Whether it is known by its path only."""


@dataclass(frozen=True)
class Lease:
    """A model that stays loaded until `release` is called."""

    model: Model
    release: Callable[[], None]


class Models(Protocol):
    """The models of a server."""

    @property
    def context(self) -> int | None:
        """The longest context of a loaded model; None: none is loaded."""
        ...

    @property
    def parallel(self) -> int:
        """Requests that the loaded models answer together."""
        ...

    async def acquire(self, name: str, keep_alive: float | None = None) -> Lease:
        """Wait until a model is loaded. `name` "": the default; `keep_alive`: seconds that it stays loaded
        when idle, None: as the server's option says.

        Raises:
            RequestError: 404, there is no such model.
            EdgeInferError: it can't be loaded.
        """
        ...

    @property
    def loaded(self) -> Sequence[str]:
        """The names of the models in memory."""
        ...

    async def cards(self) -> Sequence[ModelCard]:
        """The models that requests may name."""
        ...

    async def close(self) -> None:
        """Unload what this object loaded."""
        ...


async def card_of(models: Models, name: str) -> ModelCard:
    """The card of a model. Raises `RequestError` (404)."""
    cards = await models.cards()
    for card in cards:
        if card.name == name:
            return card
    raise not_found(name, [card.name for card in cards])


def not_found(name: str, known: Sequence[str]) -> RequestError:
    """The error for an unknown model, which names those that are here."""
    first = ", ".join(repr(one) for one in known[:8]) or "none"
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    return RequestError(
        f"model {shown(name)} isn't here; this server has {first}{more}",
        status=404,
        param="model",
        code="model_not_found",
    )


def loaded_card(model: Model, name: str) -> ModelCard:
    """The card of a model in memory, with the bytes of its plan."""
    card = ModelCard(name, "loaded", model.context, parallel=model.parallel)
    plan = model.plan
    if plan is None:
        return card
    return replace(card, loaded_bytes=plan.nbytes, gpu_bytes=plan.gpu_bytes, cache_bytes=plan.cache_bytes)


def card_with_file(file: ModelFile, card: ModelCard) -> ModelCard:
    """The card with what is known of the model's file."""
    try:
        size, modified = file.size_bytes, file.path.stat().st_mtime
    except OSError:
        size, modified = 0, 0.0
    return replace(
        card,
        path=file.path,
        size_bytes=size,
        modified=modified,
        parameters=file.parameters,
        is_path=file.source == "path",
    )


class OneModel:
    """A loaded model; its owner closes it. `file`: its file, for lists."""

    def __init__(self, model: Model, file: ModelFile | None = None) -> None:
        self._model, self._file = model, file

    @property
    def context(self) -> int | None:
        return self._model.context

    @property
    def parallel(self) -> int:
        return self._model.parallel

    async def acquire(self, name: str, keep_alive: float | None = None) -> Lease:
        if name not in ("", self._model.name):
            raise not_found(name, [self._model.name])
        return Lease(self._model, _nothing)

    @property
    def loaded(self) -> Sequence[str]:
        return [self._model.name]

    async def cards(self) -> Sequence[ModelCard]:
        card = loaded_card(self._model, self._model.name)
        return [card if self._file is None else card_with_file(self._file, card)]

    async def close(self) -> None:
        """The model stays open."""


def _nothing() -> None:
    pass
