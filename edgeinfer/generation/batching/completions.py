"""Completes several requests together, in the thread of the caller."""

from collections.abc import Sequence

from edgeinfer.engine.guards import ModelLock
from edgeinfer.generation.batching.scheduler import Scheduler
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.results import Generation, Token


def completed(
    scheduler: Scheduler, lock: ModelLock, requests: Sequence[LiveRequest]
) -> list[Generation | Exception]:
    """The completion of each request, or the error that ended it. The lock is the model's; other threads use
    the model between two steps. A `KeyboardInterrupt` ends all.
    """
    tokens: list[list[Token]] = [[] for _ in requests]
    for live in requests:
        live.on_change = _nothing
        scheduler.add(live)
    try:
        while not all(live.ended for live in requests):
            with lock:
                scheduler.step()
            for live, own in zip(requests, tokens, strict=True):
                own += live.unread
                live.unread.clear()
    except BaseException:
        for live in requests:
            live.cancelled = True
        raise
    return [
        live.generation(own) if live.error is None else live.error
        for live, own in zip(requests, tokens, strict=True)
    ]


def _nothing() -> None:
    """All requests are looked at after each step."""


def whole(result: Generation | Exception) -> Generation:
    """A completion. Raises the error that ended it."""
    if isinstance(result, Exception):
        raise result
    return result
