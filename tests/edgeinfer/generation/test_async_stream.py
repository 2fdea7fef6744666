"""Async completions: the same tokens, other work in between, cancelled tasks."""

import asyncio
import threading

import numpy as np
import pytest

from edgeinfer.errors import ContextOverflowError
from edgeinfer.results import Token
from tests.edgeinfer.fake_engine import FakeEngine, model_on, scripted, scripted_model, seeded_logits

pytestmark = pytest.mark.anyio

PROMPT = [1, 5, 6]


async def test_async_tokens_equal_those_of_a_synchronous_stream() -> None:
    model, prompt = scripted_model("The fox is here.")
    plain = model.generate(prompt, temperature=0.0)

    async def ask() -> list[str]:
        return [token.text async for token in model.stream_async(prompt, temperature=0.0)]

    assert "".join(await ask()) == plain.text == "The fox is here."
    assert (await model.generate_async(prompt, temperature=0.0)).ids == plain.ids


async def test_other_tasks_run_while_a_token_is_computed() -> None:
    started, may_continue = threading.Event(), threading.Event()

    def waiting(ids: list[int]) -> np.ndarray:
        if len(ids) > len(PROMPT):
            started.set()
            assert may_continue.wait(10)
        return seeded_logits(ids)

    async def both() -> int:
        completion = asyncio.create_task(model_on(FakeEngine(waiting)).generate_async(PROMPT, max_tokens=5))
        while not started.is_set():
            await asyncio.sleep(0)
        may_continue.set()
        return len((await completion).ids)

    assert (await both()) == 5


async def test_two_async_completions_of_a_model_alternate() -> None:
    model = model_on(FakeEngine(seeded_logits))
    alone = [model.generate([1, i], max_tokens=6, temperature=0.0).ids for i in (5, 9)]

    async def both() -> list[list[int]]:
        requested = (model.generate_async([1, i], max_tokens=6, temperature=0.0) for i in (5, 9))
        return [completion.ids for completion in await asyncio.gather(*requested)]

    assert (await both()) == alone


async def test_a_cancelled_task_ends_its_completion_and_frees_the_model() -> None:
    may_continue = threading.Event()

    def waiting_for_the_second_token(ids: list[int]) -> np.ndarray:
        if len(ids) > len(PROMPT):
            assert may_continue.wait(10)
        return scripted("Hello", len(PROMPT))(ids)

    model = model_on(FakeEngine(waiting_for_the_second_token, 4096))

    async def give_up() -> str:
        stream = model.stream_async(PROMPT, temperature=0.0)

        async def ask() -> Token:
            return await anext(stream)

        await ask()
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_continue.set()
        return stream.result.finish_reason

    assert (await give_up()) == "cancelled"
    assert len(model.generate(PROMPT, max_tokens=3).ids) == 3


async def test_stream_exceptions_propagate() -> None:
    with pytest.raises(ContextOverflowError):
        (await model_on(FakeEngine(seeded_logits, 8)).generate_async([5] * 9))


def test_a_stream_of_a_closed_loop_harms_no_other() -> None:
    model = model_on(FakeEngine(seeded_logits, 4096))
    left = model.stream_async(PROMPT, max_tokens=100, temperature=0.0)

    async def first_token() -> int:
        return (await anext(left)).id

    async def another() -> list[int]:
        return (await model.generate_async([1, 9], max_tokens=20, temperature=0.0)).ids

    alone = asyncio.run(another())
    assert asyncio.run(first_token()) == model.generate(PROMPT, max_tokens=100, temperature=0.0).ids[0]
    assert asyncio.run(another()) == alone
