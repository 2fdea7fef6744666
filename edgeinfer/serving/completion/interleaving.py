"""Reads several asynchronous generators at once: each item as soon as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def interleaved(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all sources in order of arrival, in turns where several have one. The first error ends
    the others, and is raised. A source is at most one item ahead of the reader.
    """
    if len(sources) == 1:  # without a task for each item
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield item
        return
    waiting = {asyncio.create_task(_next(source)): source for source in sources}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                source = waiting.pop(task)
                if found := task.result():
                    waiting[asyncio.create_task(_next(source))] = source
                    yield found[0]
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(source: AsyncGenerator[Item, None]) -> tuple[Item] | None:
    """The next item; None: there is no other."""
    async for item in source:
        return (item,)
    return None
