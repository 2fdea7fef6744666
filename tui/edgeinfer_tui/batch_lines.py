"""`run --batch`: the lines of standard input that have arrived, completed together."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from edgeinfer_tui.interrupts import INTERRUPTED
from edgeinfer_tui.library import LoadedModel
from edgeinfer_tui.output.script_output import prompts_by_line

if TYPE_CHECKING:
    from edgeinfer.generation.completion_cache import CompletionCache
    from edgeinfer.results import Generation

GROUP_SECONDS = 0.02
"""The next line of a group arrives within this time."""


def prompt_groups(raw: BinaryIO, most: int) -> Iterator[list[str]]:
    """As `prompts_by_line`: the next line, with those that have arrived by then, at most `most`.

    Lines are read on a thread, so that a program that sends the next one after a response gets it.
    """
    arrived: Queue[str | Exception | None] = Queue()

    def read() -> None:
        try:
            for text in prompts_by_line(raw):
                arrived.put(text)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    Thread(target=read, name="edgeinfer-lines", daemon=True).start()
    while True:
        found = [arrived.get()]
        with suppress(Empty):
            while len(found) < most:
                found.append(arrived.get(timeout=GROUP_SECONDS))
        if group := [each for each in found if isinstance(each, str)]:
            yield group
        for each in found:
            if each is None:
                return
            if isinstance(each, Exception):
                raise each


def completed_together(
    loaded: LoadedModel,
    prompts: Sequence[Any],
    settings: dict[str, Any],
    keys: Sequence[str | None],
    cache: "CompletionCache",
) -> "Iterator[Generation | Exception]":
    """The completion of each prompt, in order, or its error. Ctrl-C ends the program.

    `keys`: of the prompts in the cache; what it has, or an earlier prompt gives, isn't generated.
    """
    is_wanted = [
        key is None or (keys.index(key) == index and cache.get(key) is None) for index, key in enumerate(keys)
    ]
    wanted = [prompt for prompt, is_one in zip(prompts, is_wanted, strict=True) if is_one]
    results = loaded.generate_each(wanted, **settings)
    try:
        for index, key in enumerate(keys):
            stored = None if is_wanted[index] else cache.get(key)
            if stored is not None:
                yield stored
                continue
            # An earlier one with the same key may have failed.
            answer = next(results if is_wanted[index] else loaded.generate_each([prompts[index]], **settings))
            if not isinstance(answer, Exception):
                cache.put(key, answer)
            yield answer
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
