"""A loaded model: text and ids in, tokens and logits out, from one thread or several, until closed."""

import threading
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError
from edgeinfer.results import Generation, Speed
from edgeinfer_kernels.caches.cache_types import CacheType
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.fake_engine import FakeEngine, model_on, scripted, seeded_logits

PROMPTS = ["the rain", "a sheet on", "in the wind", "her"]


def test_the_readme_example_runs(loaded: Model) -> None:
    text = "".join(token.text for token in loaded.stream("the rain", max_tokens=8, seed=1))
    assert text == loaded.generate("the rain", max_tokens=8, seed=1).text
    assert loaded.chat(system="Be brief.").say("Hi!", max_tokens=4).finish_reason in ("stop", "length")
    assert loaded.plan is not None
    assert "layers 0-2 attention" in loaded.plan.explain()
    assert "layer 0 attention" in loaded.plan.explain(details=True)


def test_a_text_and_its_ids_give_the_same_completion(loaded: Model) -> None:
    ids = loaded.tokenizer.encode("the rain", bos=True)
    by_text, by_ids = (loaded.generate(p, max_tokens=12, temperature=0.0) for p in ("the rain", ids))
    assert by_text.prompt_ids == by_ids.prompt_ids == ids
    assert by_text.ids == by_ids.ids
    assert by_text.text == by_ids.text


def test_logits_equal_those_of_generation(loaded: Model) -> None:
    completion = loaded.generate("the rain", max_tokens=10, temperature=0.0)
    logits = loaded.logits([*completion.prompt_ids, *completion.ids])
    assert logits.shape == (len(completion.prompt_ids) + len(completion.ids), 288)
    assert logits.dtype == np.float32
    first = len(completion.prompt_ids) - 1
    assert logits[first:-1].argmax(axis=1).tolist() == completion.ids


def test_logits_do_not_depend_on_earlier_requests(loaded: Model) -> None:
    ids = [1, 50, 60, 70]
    once = loaded.logits(ids)
    loaded.generate("the rain", max_tokens=3)
    assert np.array_equal(loaded.logits(ids), once)


def test_logits_of_bad_ids_are_refused(loaded: Model) -> None:
    with pytest.raises(SettingError, match="ids: saw token id 288, wanted 0 to 287"):
        loaded.logits([288])
    with pytest.raises(SettingError, match="ids: saw str 'abc', wanted whole numbers"):
        loaded.logits("abc")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="ids: saw none, wanted at least one token id"):
        loaded.logits([])
    with pytest.raises(ContextOverflowError, match="has 257 tokens, the context holds 256"):
        loaded.logits([5] * 257)


def test_numpy_numbers_are_accepted(loaded: Model) -> None:
    plain: dict[str, Any] = {"max_tokens": 5, "top_k": 9, "seed": 3, "logprobs": 1, "temperature": 0.5}
    from_numpy: dict[str, Any] = {name: np.int64(value) for name, value in plain.items()} | {
        "temperature": np.float32(0.5)
    }
    biased: Any = {"logit_bias": {np.int32(7): np.float32(-2)}}
    completion = loaded.generate("the rain", **from_numpy, **biased)
    assert completion.ids == loaded.generate("the rain", **plain, logit_bias={7: -2.0}).ids
    counts: dict[str, Any] = {"n": np.int64(2), "max_tokens": np.int64(2)}
    assert [len(each.ids) for each in loaded.generate("the rain", **counts, temperature=0.0)] == [2, 2]
    sizes: dict[str, Any] = {"context": np.int64(64), "threads": np.int32(1)}
    with edgeinfer.load("tiny", **sizes, device="cpu", draft=None) as model:
        assert model.context == 64


def test_a_stop_that_is_not_a_string_is_refused(loaded: Model) -> None:
    wrong: tuple[Any, ...] = (5, 0, [5])
    for stop in wrong:
        with pytest.raises(SettingError, match=r"stop: saw \d, wanted a text, or a list of texts"):
            loaded.generate("the rain", stop=stop)


def test_interleaved_streams_equal_separate_streams(loaded: Model) -> None:
    alone = [loaded.generate(prompt, max_tokens=12, temperature=0.0).ids for prompt in PROMPTS]
    streams = [loaded.stream(prompt, max_tokens=12, temperature=0.0) for prompt in PROMPTS]
    open_streams = list(streams)
    while open_streams:
        open_streams = [stream for stream in open_streams if next(stream, None) is not None]
    assert [stream.result.ids for stream in streams] == alone


def test_several_threads_may_generate_concurrently(loaded: Model) -> None:
    alone = [loaded.generate(prompt, max_tokens=12, temperature=0.0).ids for prompt in PROMPTS]
    completions: dict[str, list[int]] = {}

    def generate_one(prompt: str) -> None:
        completions[prompt] = loaded.generate(prompt, max_tokens=12, temperature=0.0).ids

    threads = [threading.Thread(target=generate_one, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [completions[prompt] for prompt in PROMPTS] == alone


def test_a_long_prompt_is_prefilled_in_chunks_with_progress(zoo_file: ZooFile) -> None:
    calls: list[tuple[int, int]] = []
    ids = np.random.default_rng(3).integers(3, 288, 600).tolist()
    with edgeinfer.load(zoo_file("llama"), context=620, threads=1) as model:
        completion = model.generate(ids, max_tokens=50, seed=1, progress=lambda *seen: calls.append(seen))
        assert calls == [(256, 600), (512, 600), (600, 600)]
        assert completion.finish_reason in ("context", "stop")
        assert len(completion.ids) <= 20
        again = model.generate(ids, max_tokens=1, progress=lambda *seen: calls.append(seen))
        assert again.speed.cached_tokens == 599


def test_a_prompt_over_the_largest_context_is_an_error(loaded: Model) -> None:
    with pytest.raises(ContextOverflowError) as caught:
        loaded.generate([5] * 300)
    assert str(caught.value) == (
        "the prompt has 300 tokens, the context holds 256; shorten it: the model wasn't trained for "
        "more, or this machine's memory doesn't hold it"
    )


def test_a_smaller_context_suggests_the_largest_one(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), context=20, threads=1) as model:
        assert model.context == 20
        with pytest.raises(ContextOverflowError, match=r"holds 20; shorten it, or .*: up to 256 "):
            model.generate([5] * 30)


def test_a_closed_model_is_an_error_and_may_be_closed_again(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), threads=1, draft=None) as model:
        stream = model.stream("the rain", max_tokens=20, seed=1)
        next(stream)
    model.close()
    for generate_one in (
        lambda: model.generate("the rain"),
        lambda: model.logits([1]),
        lambda: model.chat().say("Hi"),
    ):
        with pytest.raises(EdgeInferError, match="llama has been closed; load it again"):
            generate_one()
    with pytest.raises(EdgeInferError, match="the model has been closed; load it again"):
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    assert model.tokenizer.decode(model.tokenizer.encode("the rain")) == "the rain"


def test_a_model_closes_if_its_with_block_raises() -> None:
    engine = FakeEngine(seeded_logits)
    with pytest.raises(ZeroDivisionError), model_on(engine):
        _ = 1 / 0
    assert engine.closed


def test_closing_waits_for_the_token_of_another_thread() -> None:
    engine = FakeEngine(scripted("Hello", 3))
    reached, may_continue, order = threading.Event(), threading.Event(), []
    original = engine.logits_function

    def slow(ids: list[int]) -> np.ndarray:
        reached.set()
        assert may_continue.wait(10)
        order.append("computed")
        return original(ids)

    engine.logits_function = slow
    model = model_on(engine)
    reader = threading.Thread(target=lambda: model.generate([1, 5, 6], max_tokens=1))
    reader.start()
    assert reached.wait(10)

    def close() -> None:
        model.close()
        order.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    may_continue.set()
    reader.join(10)
    closing.join(10)
    assert order == ["computed", "closed"]


def test_two_models_of_one_file_are_independent(loaded: Model, zoo_file: ZooFile) -> None:
    expected = loaded.generate("the rain", max_tokens=8, temperature=0.0).ids
    with edgeinfer.load(zoo_file("llama"), threads=1) as other:
        assert other.generate("the rain", max_tokens=8, temperature=0.0).ids == expected
        with edgeinfer.load(zoo_file("qwen2"), threads=1) as third:
            assert third.generate("the rain", max_tokens=8, temperature=0.0).ids != expected
    assert loaded.generate("the rain", max_tokens=8, temperature=0.0).ids == expected


def test_an_engine_refuses_tokens_beyond_its_cache(loaded: Model) -> None:
    engine = loaded.engine
    assert isinstance(engine, NativeEngine)
    engine.rewind(0)
    with pytest.raises(ContextOverflowError, match="257 tokens don't fit the context of 256"):
        engine.append([5] * 257)
    with pytest.raises(ValueError, match="token id 288: wanted 0 to 287"):
        engine.append([288])
    with pytest.raises(ValueError, match="no tokens to read"):
        engine.append([])


def test_rewinding_drops_later_tokens(loaded: Model) -> None:
    engine = loaded.engine
    engine.rewind(0)
    expected = engine.append([1, 50, 60])
    engine.append([70, 80])
    engine.rewind(2)
    assert engine.ids == [1, 50]
    assert np.array_equal(engine.append([60]), expected)


def test_an_f16_cache_gives_the_completion_of_an_f32_cache(zoo_file: ZooFile) -> None:
    completions = []
    kinds: tuple[CacheType, ...] = ("f16", "f32")
    for kv in kinds:
        with edgeinfer.load(zoo_file("llama"), kv=kv, threads=1) as model:
            completions.append(model.logits([1, 50, 60, 70])[-1])
    assert np.linalg.norm(completions[0] - completions[1]) < 2e-3 * np.linalg.norm(completions[1])
    assert not np.array_equal(*completions)


def test_chat_messages_are_accepted_as_prompt(zoo_file: ZooFile) -> None:
    with edgeinfer.load(zoo_file("llama"), device="cpu", draft=None, context=256) as model:
        settings: Any = {"max_tokens": 6, "temperature": 0.0}
        output = model.chat().say("the rain", **settings)
        requested = model.generate([{"role": "user", "content": "the rain"}], **settings)
        assert requested.ids == output.ids
        invalid_calls: tuple[list[Any], ...] = (
            [{"content": "no role"}],
            [{"role": "user", "content": "a"}, 5],
            [{"role": "user"}],
            [{"role": "user", "content": 5}],
        )
        for wrong in invalid_calls:
            with pytest.raises(SettingError, match="wanted messages with a role and a content"):
                model.generate(wrong)
        with pytest.raises(SettingError, match="tools: wanted the messages of a chat as prompt"):
            model.generate("the rain", tools=[{"name": "look"}])


def test_printing_a_completion_prints_its_text_and_a_model_names_itself(loaded: Model) -> None:
    completion = loaded.generate("the rain", max_tokens=8, seed=1)
    assert str(completion) == completion.text
    assert repr(loaded).startswith(f"<edgeinfer model {loaded.name}: context {loaded.context}, ")
    with edgeinfer.load("tiny", draft=None) as other:
        assert repr(other).endswith("MB read per token>")
    assert repr(other).startswith("<edgeinfer model tiny: closed, ")


def test_the_majority_is_the_most_frequent_result() -> None:
    completions = [Generation(text, [], "stop", Speed()) for text in ("a 7", " 8", "7 b", "8", "none", "7")]

    def number(text: str) -> int | None:
        digits = "".join(filter(str.isdigit, text))
        return int(digits) if digits else None

    assert edgeinfer.majority(completions, number) == (7, 0.6)
    assert edgeinfer.majority(completions[1:4:2]) == ("8", 1.0)
    with pytest.raises(ValueError, match="saw 0 completions, wanted at least one with an answer"):
        edgeinfer.majority([])
