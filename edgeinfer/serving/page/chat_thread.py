"""The chat store on a thread of its server: opened at the first use, and again after it was found damaged."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from edgeinfer.history.damaged_store import DamagedStoreError
from edgeinfer.history.store import ChatStore
from edgeinfer.serving.fields import RequestError

Result = TypeVar("Result")


class ChatThread:
    """Runs functions of the chat store. `path`: its file; None: the one of the terminal chat."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._store: ChatStore | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="edgeinfer-chats")

    async def run(self, work: Callable[[ChatStore], Result]) -> Result:
        """The result of a function. Raises `ChatStoreError`, or `RequestError` (500) for SQLite's errors."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._done, work)

    def _done(self, work: Callable[[ChatStore], Result]) -> Result:
        try:
            if self._store is None:
                self._store = ChatStore(self._path)
            return work(self._store)
        except DamagedStoreError:
            self._close()
            raise
        except (sqlite3.Error, OSError) as error:
            raise RequestError(f"the chat store: {error}", status=500) from error

    def _close(self) -> None:
        if self._store is not None:
            with suppress(sqlite3.Error):
                self._store.close()
            self._store = None

    async def close(self) -> None:
        """Close the store, after the work that has begun."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)
        self._pool.shutdown(wait=False)
