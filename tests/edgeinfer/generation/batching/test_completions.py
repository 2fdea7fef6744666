"""Several prompts in one call: completions in order, errors of single prompts, ends before the last one."""

from collections.abc import Iterator
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import ContextOverflowError, SettingError
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.generation.batching.live_engines import prompt

SETTINGS: dict[str, Any] = {"max_tokens": 15, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def model(zoo_file: ZooFile) -> Iterator[Model]:
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=1, context=200) as loaded:
        yield loaded


@pytest.mark.parametrize("count", [1, 5, pytest.param(40, marks=pytest.mark.slow)])
def test_several_prompts_give_the_completions_of_each(model: Model, count: int) -> None:
    prompts = [prompt(10 + seed, seed) for seed in range(count)]
    alone = [model.generate(ids, **SETTINGS).ids for ids in prompts]
    assert [completion.ids for completion in model.generate(prompts, **SETTINGS)] == alone


def test_prompts_may_end_shortly_after_a_chunk(zoo_file: ZooFile) -> None:
    """A few tokens more than a step of the engine may have."""
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=1, context=600) as model:
        assert isinstance(model.engine, NativeEngine)
        size = model.engine.batch
        prompts = [prompt(size + more, more) for more in (1, 16, 17, 64, size + 8)]
        together = model.generate(prompts, max_tokens=3, temperature=0.0)
    with edgeinfer.load(zoo_file("llama"), device="cpu", threads=1, context=600) as model:
        alone = [model.generate(ids, max_tokens=3, temperature=0.0).ids for ids in prompts]
    assert [completion.ids for completion in together] == alone


def test_texts_and_chats_may_be_several_prompts(loaded: Model) -> None:
    texts = ["One", "Two and more"]
    expected = [loaded.generate(text, max_tokens=4, temperature=0.0).text for text in texts]
    assert [each.text for each in loaded.generate(texts, max_tokens=4, temperature=0.0)] == expected
    chats = [[{"role": "user", "content": text}] for text in texts]
    expected = [loaded.generate(chat, max_tokens=4, temperature=0.0).text for chat in chats]
    assert [each.text for each in loaded.generate(chats, max_tokens=4, temperature=0.0)] == expected


def test_an_engine_without_batches_completes_one_prompt_after_another() -> None:
    engine = FakeEngine(seeded_logits)
    model = model_on(engine)
    prompts = [[1, 5, 6], [1, 9], [1, 5, 8, 8]]
    alone = [model.generate(ids, **SETTINGS).ids for ids in prompts]
    assert [completion.ids for completion in model.generate(prompts, **SETTINGS)] == alone


def test_an_error_of_a_prompt_is_returned_in_order(model: Model) -> None:
    prompts = [prompt(10), prompt(300), [10_000], prompt(12)]
    results = list(model.generate_each(prompts, max_tokens=3))
    assert isinstance(results[1], ContextOverflowError)
    assert isinstance(results[2], SettingError)
    assert [len(results[index].ids) for index in (0, 3)] == [3, 3]  # type: ignore[union-attr]
    with pytest.raises(ContextOverflowError):
        model.generate(prompts, max_tokens=3)


def test_closing_the_iterator_cancels_the_others(model: Model) -> None:
    results = model.generate_each([prompt(10, seed) for seed in range(3)], max_tokens=150)
    assert not isinstance(next(results), Exception)
    results.close()  # type: ignore[attr-defined]
    assert len(model.generate(prompt(10), max_tokens=3).ids) == 3


@pytest.mark.parametrize("name", ["n", "best_of", "beams"])
def test_several_prompts_get_one_completion_each(model: Model, name: str) -> None:
    with pytest.raises(SettingError, match=f"{name}: saw 2, but each of several prompts gets one completion"):
        model.generate([[1, 5], [1, 6]], **{name: 2})  # type: ignore[call-overload]


def test_no_prompts_are_one_empty_prompt(model: Model) -> None:
    with pytest.raises(SettingError, match="the prompt is empty"):
        model.generate([])


def test_logprobs_and_grammars_are_those_of_each_prompt(loaded: Model) -> None:
    grammar = 'start: "yes" | "no" | "maybe"'
    results = loaded.generate(["A", "B", "C"], grammar=grammar, max_tokens=9, temperature=2.0, seed=1)
    assert {each.text for each in results} <= {"yes", "no", "maybe"}
    assert {each.finish_reason for each in results} == {"stop"}
    with_logprobs = loaded.generate(["A", "B"], max_tokens=3, logprobs=2)
    assert all(len(token.top_logprobs) == 2 for each in with_logprobs for token in each.tokens)


def test_seeded_completions_with_a_grammar_are_those_of_each_alone(loaded: Model) -> None:
    """Forced tokens take no random number, in a batch too."""
    options: dict[str, Any] = {"schema": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}}
    options |= {"max_tokens": 40, "temperature": 1.5, "seed": 8}
    prompts = ["A", "B", "C"]
    alone = [loaded.generate(text, **options).ids for text in prompts]
    assert [each.ids for each in loaded.generate(prompts, **options)] == alone
