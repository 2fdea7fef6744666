"""Streams that are cancelled, observed and interleaved; what a cached prefix saves."""

import threading
from typing import Any

import pytest

from tests.edgeinfer.fake_engine import (
    FakeEngine,
    byte_ids,
    model_on,
    scripted,
    scripted_model,
    seeded_logits,
)

GREEDY: dict[str, Any] = {"temperature": 0.0}
PROMPT = [1, 5, 6]


def test_cancelling_keeps_the_generated_text() -> None:
    model, prompt = scripted_model("Hello there")
    stream = model.stream(prompt, **GREEDY)
    output = [next(stream).text for _ in range(5)]
    stream.cancel()
    stream.cancel()
    assert "".join(output) == stream.result.text == "Hello"
    assert stream.result.finish_reason == "cancelled"
    assert list(stream) == []
    assert model.generate(prompt, **GREEDY).text == "Hello there"


def test_a_stream_cancelled_before_its_start_is_empty() -> None:
    model, prompt = scripted_model("Hello")
    stream = model.stream(prompt)
    stream.cancel()
    assert list(stream) == []
    assert (stream.result.text, stream.result.ids, stream.result.finish_reason) == ("", [], "cancelled")


def test_cancelling_after_the_end_changes_nothing() -> None:
    model, prompt = scripted_model("Hi")
    stream = model.stream(prompt, **GREEDY)
    assert len(list(stream)) == 2
    stream.cancel()
    assert stream.result.finish_reason == "stop"


def test_reading_a_stream_gives_the_whole_completion() -> None:
    model, prompt = scripted_model("Hello there")
    stream = model.stream(prompt, **GREEDY)
    assert next(stream).text == "H"
    completion = stream.read()
    assert (completion.text, completion.finish_reason) == ("Hello there", "stop")
    assert stream.read() == stream.result == completion
    assert list(stream) == []


def test_reading_a_cancelled_stream_gives_what_was_read_before() -> None:
    model, prompt = scripted_model("Hello there")
    stream = model.stream(prompt, **GREEDY)
    assert next(stream).text == "H"
    stream.cancel()
    assert (stream.read().text, stream.result.finish_reason) == ("H", "cancelled")


def test_ctrl_c_while_a_stream_is_read_keeps_the_partial_completion() -> None:
    engine = FakeEngine(scripted("Hello there", 3))
    model = model_on(engine)
    engine.interrupt_at = 8
    stream = model.stream(PROMPT, **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        stream.read()
    assert (stream.result.text, stream.result.finish_reason) == ("Hello ", "cancelled")


def test_ctrl_c_keeps_the_partial_completion_and_the_model() -> None:
    engine = FakeEngine(scripted("Hello there", 3))
    model = model_on(engine)
    engine.interrupt_at = 8
    stream = model.stream(PROMPT, **GREEDY)
    output = ""
    for _ in range(6):
        output += next(stream).text
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert output == stream.result.text == "Hello "
    assert stream.result.finish_reason == "cancelled"
    assert list(stream) == []
    assert model.generate(PROMPT, **GREEDY).text == "Hello there"


def test_ctrl_c_during_prefill_keeps_the_prefilled_tokens() -> None:
    engine = FakeEngine(scripted("Hi", 12))
    model, prompt = model_on(engine), list(range(3, 15))
    engine.interrupt_at = 8
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt)
    completion = model.generate(prompt, **GREEDY)
    assert completion.text == "Hi"
    assert completion.speed.cached_tokens == 8


def test_ctrl_c_in_the_progress_callback_leaves_the_model_usable() -> None:
    model, prompt = scripted_model("Hi", prompt=list(range(3, 15)))

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, progress=interrupt)
    assert model.generate(prompt, **GREEDY).text == "Hi"


def test_cancelling_from_the_progress_callback_leaves_the_prompt() -> None:
    engine = FakeEngine(scripted("Hi", 12))
    seen: list[int] = []

    def stop_at_eight(done: int, total: int) -> None:
        seen.append(done)
        if done == 8:
            stream.cancel()

    stream = model_on(engine).stream(list(range(3, 15)), progress=stop_at_eight)
    assert list(stream) == []
    assert seen == [4, 8]
    assert stream.result.finish_reason == "cancelled"
    assert len(engine.ids) == 8


def test_another_thread_may_cancel_in_the_middle_of_a_token() -> None:
    engine = FakeEngine(scripted("Hello there", 3))
    reached, may_continue = threading.Event(), threading.Event()
    original = engine.logits_function

    def slow(ids: list[int]) -> Any:
        if len(ids) == 6:
            reached.set()
            assert may_continue.wait(10)
        return original(ids)

    engine.logits_function = slow
    stream = model_on(engine).stream(PROMPT, **GREEDY)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    assert reached.wait(10)
    stream.cancel()
    may_continue.set()
    reader.join(10)
    assert not reader.is_alive()
    assert stream.result.text == "Hell"
    assert stream.result.finish_reason == "cancelled"


def test_progress_counts_prefilled_tokens() -> None:
    model, prompt = scripted_model("Hi", prompt=list(range(3, 13)))
    calls: list[tuple[int, int]] = []
    model.generate(prompt, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(4, 10), (8, 10), (10, 10)]


def test_a_shared_prefix_is_not_prefilled_again() -> None:
    engine = FakeEngine(scripted("Hi", 3))
    model = model_on(engine)
    model.generate(PROMPT, **GREEDY)
    engine.read.clear()
    longer = [*PROMPT, *byte_ids("Hi"), 30, 31]
    engine.logits_function = scripted("Ho", len(longer))
    completion = model.generate(longer, **GREEDY)
    assert completion.text == "Ho"
    # The last token and the end were sampled but never evaluated.
    assert completion.speed.cached_tokens == 5
    assert engine.read[0] == 2


def test_a_repeated_prompt_prefills_its_last_token_only() -> None:
    engine = FakeEngine(scripted("Hi", 3))
    model = model_on(engine)
    first, again = (model.generate(PROMPT, **GREEDY) for _ in range(2))
    assert first.text == again.text
    assert (first.speed.cached_tokens, again.speed.cached_tokens) == (0, 2)


def test_two_interleaved_streams_equal_separate_streams() -> None:
    model = model_on(FakeEngine(seeded_logits))
    prompts = ([1, 5, 6], [1, 5, 9, 9])
    alone = [model.generate(prompt, max_tokens=15, seed=4).ids for prompt in prompts]
    streams = [model.stream(prompt, max_tokens=15, seed=4) for prompt in prompts]
    together: list[list[int]] = [[], []]
    for number in range(30):
        together[number % 2].append(next(streams[number % 2]).id)
    assert together == alone
    assert [stream.result.ids for stream in streams] == alone
