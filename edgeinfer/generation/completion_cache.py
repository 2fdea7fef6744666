"""Completions that are returned again for the same prompt and options, without generating them."""

import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.results import Generation, Speed, Token

COMPLETE = ("stop", "length", "context")
"""Reasons for which a completion ends by itself."""


class CompletionCache:
    """The last `size` completions whose tokens don't depend on chance: greedy ones, or those with a seed.

    `defaults`: sampling parameters of the model that the options of a request override. Thread-safe.
    """

    def __init__(self, size: int, defaults: Mapping[str, Any]) -> None:
        self._size, self._defaults = size, dict(defaults)
        self._completions: OrderedDict[str, Generation] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, prompt: object, options: Mapping[str, Any]) -> str | None:
        """The key of a request; None: its completion can't be returned again."""
        settings = {**self._defaults, **options}
        settings.pop("progress", None)
        if self._size == 0 or (settings.get("seed") is None and settings.get("temperature") != 0):
            return None
        try:
            return json.dumps([prompt, settings], sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            return None

    def get(self, key: str | None) -> Generation | None:
        """The stored completion, whose prompt counts as cached and whose rates are 0; None without one."""
        with self._lock:
            found = None if key is None else self._completions.get(key)
            if key is None or found is None:
                return None
            self._completions.move_to_end(key)
        tokens = found.speed.prompt_tokens
        speed = Speed(tokens, cached_tokens=tokens, generated_tokens=found.speed.generated_tokens)
        return replace(found, speed=speed)

    def put(self, key: str | None, completion: Generation) -> None:
        """Store a completion, unless it was ended from outside; the one that was used least recently goes."""
        if key is None or completion.finish_reason not in COMPLETE:
            return
        with self._lock:
            self._completions[key] = completion
            self._completions.move_to_end(key)
            while len(self._completions) > self._size:
                self._completions.popitem(last=False)


class StoredStream:
    """The tokens of a stored completion, as an `AsyncTokenStream`."""

    def __init__(self, completion: Generation) -> None:
        self.result = completion
        self._tokens = iter(completion.tokens)

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        for token in self._tokens:
            return token
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Nothing is running."""
