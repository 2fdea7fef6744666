"""Several models within one memory budget: loaded on request, unloaded when idle or least recently used."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from edgeinfer.model import Model
from edgeinfer.registry.model_file import ModelFile
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.models.installed import ModelSource
from edgeinfer.serving.models.models import Lease, ModelCard, State, card_with_file, loaded_card, not_found

Result = TypeVar("Result")
FOREVER = -1.0


@dataclass
class _Loaded:
    """A model in memory. `leases`: requests that use it; `is_leaving`: it takes no further ones."""

    name: str
    model: Model
    keep_alive: float
    leases: int = 0
    last_used: float = 0.0
    expires: float | None = None
    is_leaving: bool = False
    timer: asyncio.TimerHandle | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class ModelPool:
    """The models of a source. `keep_alive`: seconds that an idle model stays loaded, negative: forever.
    `default`: the model of requests that name none.

    One model is loaded at a time, in the order of requests. Where the memory isn't enough for it and the
    others, the one that was used least recently takes no further requests, ends its running ones, and is
    unloaded.
    """

    def __init__(self, source: ModelSource, keep_alive: float = 300.0, default: str = "") -> None:
        self._source, self._keep_alive, self._default = source, keep_alive, default
        self._loaded: dict[str, _Loaded] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()
        """Requests that wait for the load of a model."""
        self._one_at_a_time = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-models")
        self._background: set[asyncio.Task[None]] = set()

    @property
    def context(self) -> int | None:
        """The longest context of a loaded model."""
        return max((one.model.context for one in self._loaded.values()), default=None)

    @property
    def parallel(self) -> int:
        """Requests that the loaded models answer together."""
        return sum(one.model.parallel for one in self._loaded.values())

    async def acquire(self, name: str, keep_alive: float | None = None) -> Lease:
        """Wait until a model is loaded; as `Models.acquire`."""
        file = await self._file(name)
        while (loaded := self._loaded.get(file.name)) is None or loaded.is_leaving:
            task = self._loads.get(file.name)
            if task is None:
                task = asyncio.create_task(self._load(file))
                self._loads[file.name] = task
                task.add_done_callback(partial(self._load_ended, file.name))
            self._waiting[file.name] += 1
            try:
                await asyncio.shield(task)  # a client that disconnects doesn't end the load of others
            finally:
                self._waiting[file.name] -= 1
        return self._lease(loaded, keep_alive)

    def _load_ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._loads.pop(name, None)
        if not task.cancelled():
            task.exception()  # those who wait for the load raise it

    async def _file(self, name: str) -> ModelFile:
        """The file of a requested model. Raises `RequestError` (404)."""
        files = await asyncio.to_thread(self._source.files)
        requested = name or self._default or self._last_used()
        if not requested and len(files) == 1:
            return next(iter(files.values()))
        if not requested:
            raise RequestError(
                f"model: saw none, wanted one of {', '.join(map(repr, list(files)[:8]))}", param="model"
            )
        if requested not in files:
            files = await asyncio.to_thread(self._source.files, refresh=True)
        # A name without its quantization is that of the first one.
        named = [file for known, file in files.items() if requested in (known, known.partition(":")[0])]
        if not named:
            raise not_found(requested, list(files))
        return next((file for file in named if file.name == requested), named[0])

    def _last_used(self) -> str:
        """The model that was used last; "": none is loaded."""
        used = max(self._loaded.values(), key=lambda one: one.last_used, default=None)
        return "" if used is None else used.name

    def _lease(self, loaded: _Loaded, keep_alive: float | None) -> Lease:
        loaded.leases += 1
        loaded.idle.clear()
        loaded.last_used, loaded.expires = time.perf_counter(), None
        loaded.keep_alive = self._keep_alive if keep_alive is None else keep_alive
        if loaded.timer is not None:
            loaded.timer.cancel()
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._released(loaded)

        return Lease(loaded.model, release)

    def _released(self, loaded: _Loaded) -> None:
        loaded.leases -= 1
        if loaded.leases == 0:
            self._idle(loaded)

    def _idle(self, loaded: _Loaded) -> None:
        """No request uses the model now."""
        loaded.last_used = time.perf_counter()
        loaded.idle.set()
        if loaded.keep_alive >= 0 and not loaded.is_leaving:
            loaded.expires = time.time() + loaded.keep_alive
            loop = asyncio.get_running_loop()
            loaded.timer = loop.call_later(loaded.keep_alive, self._expire, loaded)

    def _expire(self, loaded: _Loaded) -> None:
        """Unload a model that has been idle for long enough; not before those who wait for it have had it."""
        if loaded.leases == 0 and not loaded.is_leaving and not self._waiting[loaded.name]:
            loaded.is_leaving = True
            task = asyncio.create_task(self._expired(loaded))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _expired(self, loaded: _Loaded) -> None:
        async with self._one_at_a_time:
            await self._unload(loaded)

    async def _load(self, file: ModelFile) -> None:
        """Load a model, after those that must leave for it have ended their requests."""
        async with self._one_at_a_time:
            if (current := self._loaded.get(file.name)) is not None:
                await self._unload(current)  # it is leaving
            while self._loaded and not await self._fits(file):
                idle_first = sorted(self._loaded.values(), key=lambda one: (one.leases > 0, one.last_used))
                await self._unload(idle_first[0])
            others = [one.model for one in self._loaded.values()]
            model = await self._run(lambda: self._source.load(file, others))
            loaded = self._loaded[file.name] = _Loaded(file.name, model, self._keep_alive)
            self._idle(loaded)

    async def _fits(self, file: ModelFile) -> bool:
        others = [one.model for one in self._loaded.values()]
        return await self._run(lambda: self._source.fits_with(file, others))

    async def _unload(self, loaded: _Loaded) -> None:
        """Close a model once its requests have ended; it takes no further ones."""
        loaded.is_leaving = True
        if loaded.timer is not None:
            loaded.timer.cancel()
        await loaded.idle.wait()
        if self._loaded.get(loaded.name) is loaded:
            await self._run(loaded.model.close)
            del self._loaded[loaded.name]
            # Vocabularies and grammars are in reference cycles, which Python's collector reaches late.
            await self._run(gc.collect)

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Run a slow function on the thread of this pool."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def loaded(self) -> Sequence[str]:
        """The names of the models in memory."""
        return list(self._loaded)

    async def cards(self) -> Sequence[ModelCard]:
        """The models on this disk, with their state."""
        files = await asyncio.to_thread(self._source.files)
        return [self._card(name, file) for name, file in files.items()]

    def _card(self, name: str, file: ModelFile) -> ModelCard:
        loaded = self._loaded.get(name)
        if loaded is None:
            return card_with_file(file, ModelCard(name, "loading" if name in self._loads else "not loaded"))
        state: State = "unloading" if loaded.is_leaving else "loaded"
        card = loaded_card(loaded.model, name)
        return card_with_file(file, replace(card, state=state, expires=loaded.expires))

    async def close(self) -> None:
        """Unload all models, after the token that each computes."""
        for loaded in list(self._loaded.values()):
            if loaded.timer is not None:
                loaded.timer.cancel()
            await self._run(loaded.model.close)
        self._loaded.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
