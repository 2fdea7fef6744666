"""What the terminal asks of the library, written down; the one place that brings in the engine."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

if TYPE_CHECKING:
    from edgeinfer.results import Generation, Token

Progress = Callable[[int, int], None]


class Stream(Protocol):
    """Tokens as they come; `result` is the answer so far, and the whole answer at the end."""

    @property
    def result(self) -> "Generation": ...

    def __iter__(self) -> Iterator["Token"]: ...

    def cancel(self) -> None: ...


class Conversation(Protocol):
    """A chat that remembers its turns."""

    messages: list[dict[str, Any]]
    system: str | None

    @property
    def context_used(self) -> int: ...

    def stream(self, text: str, **settings: Any) -> Stream: ...

    def regenerate(self, **settings: Any) -> Stream: ...

    def edit(self, index: int, text: str, **settings: Any) -> Stream: ...

    def clear(self) -> None: ...


class LoadedModel(Protocol):
    """A model that is ready to speak."""

    name: str
    notes: tuple[str, ...]
    """Remarks on how it was loaded, a line each."""
    tokenizer: Any
    plan: Any
    chat_format: Any | None
    prompt_style: str | None

    @property
    def context(self) -> int: ...

    def stream(self, prompt: str | Sequence[int], **settings: Any) -> Stream: ...

    def generate(
        self, prompt: str | list[dict[str, Any]], *, n: int, **settings: Any
    ) -> "list[Generation]": ...

    def chat(self, system: str | None = None, **settings: Any) -> Conversation: ...

    def keep_snapshot(self, owner: str | None = None) -> bool:
        """Keep what was read on the disk, for the next time; it is deleted with `owner`."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_model(name: str | None) -> None:
    """See whether a model is there and its file can be opened; nothing of it is loaded.

    Raises: as `edgeinfer.load` does of a name that leads nowhere, or of a file that is none.
    """
    from edgeinfer.registry.registry import find_model
    from edgeinfer_quant_formats import GGUFFile

    GGUFFile.open(find_model(name).path).close()


def load_model(
    name: str | None, settings: dict[str, Any], progress: Progress, build_progress: Progress
) -> LoadedModel:
    """Load a model by name or path; `settings` are the keywords of `edgeinfer.load`.

    `progress` hears of bytes loaded, `build_progress` of kernels compiled, which happens once a machine.
    """
    edgeinfer = cast(Any, importlib.import_module("edgeinfer"))
    loaded = edgeinfer.load(name, **settings, progress=progress, build_progress=build_progress)
    return cast(LoadedModel, loaded)
