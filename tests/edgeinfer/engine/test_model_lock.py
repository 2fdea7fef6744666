"""A callback that calls its model gets an error; other threads wait."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from edgeinfer import Model
from edgeinfer.errors import EdgeInferError
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits

CALLS: list[Callable[[Model], Any]] = [
    lambda model: model.generate("again", max_tokens=1),
    lambda model: model.generate("again", n=2, max_tokens=1),
    lambda model: model.embed("again"),
    lambda model: model.logits([1, 2]),
    lambda model: model.chat().say("again", max_tokens=1),
    lambda model: model.close(),
]


@pytest.mark.parametrize("again", CALLS)
def test_a_callback_that_calls_the_model_gets_an_error_instead_of_a_deadlock(
    again: Callable[[Model], Any],
) -> None:
    model = model_on(FakeEngine(seeded_logits, 64))
    seen: list[str] = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(EdgeInferError, match="a callback can't call it") as caught:
            again(model)
        seen.append(str(caught.value))

    completion = model.generate("Hi", max_tokens=2, progress=progress)
    assert len(completion.ids) == 2
    assert seen
    assert model.generate("Hi", max_tokens=2).ids


def test_another_thread_waits_for_the_lock() -> None:
    model = model_on(FakeEngine(seeded_logits, 64))
    started, result = threading.Event(), []

    def other() -> None:
        started.set()
        result.append(model.generate("there", max_tokens=2).ids)

    thread = threading.Thread(target=other)

    def progress(done: int, total: int) -> None:
        if not started.is_set():
            thread.start()
            started.wait(10)

    assert model.generate("Hi", max_tokens=2, progress=progress).ids
    thread.join(10)
    assert len(result) == 1
