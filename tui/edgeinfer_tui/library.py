"""Protocols of the library objects that the terminal uses; the only module that imports the engine."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

if TYPE_CHECKING:
    from edgeinfer.chat_templates.tool_calls import ToolCall
    from edgeinfer.embedding import TextVectors
    from edgeinfer.options.load_options import LocalEngine
    from edgeinfer.ranking import Ranking
    from edgeinfer.results import Generation, Token

Progress = Callable[[int, int], None]


class Stream(Protocol):
    """A token stream; `result` is the completion so far, complete at the end."""

    @property
    def result(self) -> "Generation": ...

    def __iter__(self) -> Iterator["Token"]: ...

    def cancel(self) -> None: ...


class Conversation(Protocol):
    """A chat that keeps its history."""

    messages: list[dict[str, Any]]
    system: str | None
    tool_calls: "tuple[ToolCall, ...]"

    @property
    def context_used(self) -> int: ...

    def stream(self, text: str, **settings: Any) -> Stream: ...

    def stream_results(self, results: Sequence[Any], **settings: Any) -> Stream: ...

    def edit(self, index: int, text: str, **settings: Any) -> Stream: ...

    def clear(self) -> None: ...


class LoadedModel(Protocol):
    """A loaded model."""

    name: str
    warnings: tuple[str, ...]
    """Warnings from loading, one line each."""
    details: tuple[str, ...]
    """Lines about how the model runs."""
    tokenizer: Any
    plan: Any
    chat_format: Any | None
    prompt_style: str | None
    sampling: dict[str, Any]
    gpu: int | None

    @property
    def context(self) -> int: ...

    def stream(self, prompt: str | Sequence[int], **settings: Any) -> Stream: ...

    def generate(
        self, prompt: str | list[dict[str, Any]], *, n: int, **settings: Any
    ) -> "list[Generation]": ...

    def generate_each(
        self, prompts: Sequence[str] | Sequence[list[dict[str, Any]]], **settings: Any
    ) -> "Iterator[Generation | Exception]": ...

    def chat(self, system: str | None = None, **settings: Any) -> Conversation: ...

    def text_vectors(
        self, texts: Sequence[str], pooling: str | None = None, normalize: bool = True
    ) -> "TextVectors": ...

    def ranking(self, query: str, texts: Sequence[str]) -> "Ranking": ...

    def keep_snapshot(self, owner: str | None = None) -> bool:
        """Save the KV cache to disk for later runs; it is deleted together with `owner`."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def is_remote(settings: Mapping[str, Any]) -> bool:
    """Whether a server has the model; `settings`: the keywords of `edgeinfer.load`."""
    return settings.get("engine") == "openai"


def check_model(name: str | None) -> None:
    """Check that a model exists and its file can be opened; no weights are loaded.

    Raises: as `edgeinfer.load` for a name that isn't found, or a file that isn't a model.
    """
    from edgeinfer.hugging_face.opening import open_file
    from edgeinfer.registry.registry import find_model

    open_file(find_model(name).path).close()


def missing_model(name: str) -> str | None:
    """The argument of `pull` for a model of the registry that isn't on this disk; None: it is, or it is
    unknown.
    """
    from edgeinfer.errors import EdgeInferError, NotPulledError
    from edgeinfer.registry.registry import find_model

    try:
        find_model(name)
    except NotPulledError as missing:
        return missing.name
    except EdgeInferError:  # reported when it is loaded
        return None
    return None


def pull_model(name: str, engine: str, progress: Callable[[int, int | None], None]) -> str:
    """Download a model of the registry or an address and return its name; partial data is continued.

    `progress` is called with the bytes received and the total, None if it is unknown.

    Raises: as `edgeinfer.pull`.
    """
    from edgeinfer.download.pulling import Pull, pull
    from edgeinfer.download.transfer import RetryPolicy, TransferCallbacks
    from edgeinfer.registry.registry import default_models_folder

    callbacks = TransferCallbacks(progress, progress)
    settings = Pull(default_models_folder(), callbacks, RetryPolicy(), engine=cast("LocalEngine", engine))
    return pull(name, settings).name


def model_size(name: str | None) -> int:
    """Bytes of a model's files; 0: they can't be read."""
    from edgeinfer.errors import EdgeInferError
    from edgeinfer.registry.registry import find_model

    try:
        return find_model(name).size_bytes
    except (EdgeInferError, OSError):
        return 0


def load_model(
    name: str | None, settings: dict[str, Any], progress: Progress, build_progress: Progress
) -> LoadedModel:
    """Load a model by name or path; `settings` are the keywords of `edgeinfer.load`.

    `progress` is called with bytes loaded, `build_progress` with kernels compiled (once per machine).
    """
    edgeinfer = cast(Any, importlib.import_module("edgeinfer"))
    loaded = edgeinfer.load(name, **settings, progress=progress, build_progress=build_progress)
    return cast(LoadedModel, loaded)
