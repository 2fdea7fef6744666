"""From a prompt to a stream of tokens, on engines with scripted logits."""

import math
from typing import Any

import numpy as np
import pytest

from edgeinfer.engine.kv_cache import KVCache, shared_prefix
from edgeinfer.errors import ContextOverflowError, LogitsError, SettingError
from tests.edgeinfer.fake_engine import (
    END,
    FakeEngine,
    byte_ids,
    model_on,
    scripted,
    scripted_model,
    seeded_logits,
)
from tests.random_models import VOCABULARY

GREEDY: dict[str, Any] = {"temperature": 0.0}
PROMPT = [1, 5, 6]


def test_a_completion_ends_at_the_eos_token() -> None:
    model, prompt = scripted_model("Hello there")
    completion = model.generate(prompt, **GREEDY)
    assert completion.text == "Hello there"
    assert completion.ids == byte_ids("Hello there")
    assert completion.finish_reason == "stop"
    assert completion.prompt_ids == prompt


def test_max_tokens_ends_a_completion() -> None:
    model, prompt = scripted_model("Hello there")
    completion = model.generate(prompt, max_tokens=4, **GREEDY)
    assert (completion.text, completion.finish_reason) == ("Hell", "length")


@pytest.mark.parametrize(("limit", "text"), [(0, ""), (1, "H")])
def test_max_tokens_may_be_none_or_one(limit: int, text: str) -> None:
    model, prompt = scripted_model("Hello")
    completion = model.generate(prompt, max_tokens=limit, **GREEDY)
    assert (completion.text, len(completion.ids), completion.finish_reason) == (text, limit, "length")


def test_a_completion_of_max_tokens_has_finish_reason_length() -> None:
    model, prompt = scripted_model("Hi")
    assert model.generate(prompt, max_tokens=2, **GREEDY).finish_reason == "length"
    assert model.generate(prompt, max_tokens=3, **GREEDY).finish_reason == "stop"


def test_the_context_may_be_filled_exactly() -> None:
    model, prompt = scripted_model("x" * 100, context=16)
    completion = model.generate(prompt, **GREEDY)
    assert (len(completion.ids), completion.finish_reason) == (13, "context")
    assert len(completion.prompt_ids) + len(completion.ids) == model.context


def test_a_prompt_that_fills_the_context_leaves_no_room_for_a_completion() -> None:
    model, prompt = scripted_model("x", prompt=list(range(3, 19)), context=16)
    completion = model.generate(prompt, **GREEDY)
    assert (completion.text, completion.finish_reason) == ("", "context")


def test_a_prompt_longer_than_the_context_names_both_lengths_and_the_maximum() -> None:
    model, prompt = scripted_model("x", prompt=list(range(3, 20)), context=16)
    with pytest.raises(ContextOverflowError) as caught:
        model.generate(prompt)
    assert str(caught.value) == (
        "the prompt has 17 tokens, the context holds 16; shorten it, or take a larger context "
        "(context=): up to 64 the model was trained for and fits this machine"
    )
    assert model.generate(prompt[:16]).finish_reason == "context"


def test_a_character_split_over_tokens_is_emitted_whole() -> None:
    model, prompt = scripted_model("añ😀b")
    tokens = list(model.stream(prompt, **GREEDY))
    assert [token.text for token in tokens] == ["a", "", "ñ", "", "", "", "😀", "b"]
    assert [token.id for token in tokens] == byte_ids("añ😀b")


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    model, prompt = scripted_model("a😀")
    completion = model.generate(prompt, max_tokens=3, **GREEDY)
    assert completion.text == "a\ufffd"
    assert [token.text for token in completion.tokens] == ["a", "", "\ufffd"]


def test_invalid_utf8_does_not_stop_the_stream() -> None:
    model, prompt = scripted_model(b"a\xff\xfeb")
    assert model.generate(prompt, **GREEDY).text == "a\ufffd\ufffdb"


@pytest.mark.parametrize("stop", ["<|", ["<|", "never"], ("never", "<|"), iter(["<|"])])
def test_a_stop_string_over_several_tokens_ends_the_completion_before_it(stop: Any) -> None:
    model, prompt = scripted_model("a < b <| c")
    tokens = []
    for token in (stream := model.stream(prompt, stop=stop, **GREEDY)):
        tokens.append(token)
        assert "<|" not in token.text
    assert "".join(token.text for token in tokens) == stream.result.text == "a < b "
    assert stream.result.finish_reason == "stop"
    assert stream.result.ids == byte_ids("a < b <|")


def test_a_possible_stop_string_is_held_back() -> None:
    model, prompt = scripted_model("x END y ENT")
    shown = ""
    for token in model.stream(prompt, stop="END!", **GREEDY):
        shown += token.text
        assert not shown.endswith(("E", "EN"))
    assert shown == "x END y ENT"


def test_a_stop_string_at_the_start_gives_an_empty_completion() -> None:
    model, prompt = scripted_model("\n\nHello")
    completion = model.generate(prompt, stop="\n\n", **GREEDY)
    assert (completion.text, completion.finish_reason) == ("", "stop")


def test_held_back_text_is_emitted_at_the_end() -> None:
    model, prompt = scripted_model("a EN")
    completion = model.generate(prompt, stop="END", **GREEDY)
    assert completion.text == "a EN"
    assert completion.ids == [token.id for token in completion.tokens] == byte_ids("a EN")


def test_a_stop_string_is_found_after_an_incomplete_character() -> None:
    model, prompt = scripted_model("ñE" + "ND")
    assert model.generate(prompt, stop="END", **GREEDY).text == "ñ"


def test_an_empty_stop_list_equals_none() -> None:
    model, prompt = scripted_model("abc")
    assert {model.generate(prompt, stop=stop, **GREEDY).text for stop in (None, (), [], "", [""])} == {"abc"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_tokens": -1}, "max_tokens: saw -1, wanted a whole number of at least 0, or None"),
        ({"max_tokens": 2.5}, "max_tokens: saw 2.5, wanted a whole number of at least 0, or None"),
        ({"max_tokens": "8"}, "max_tokens: saw '8', wanted a whole number of at least 0, or None"),
        ({"logprobs": -1}, "logprobs: saw -1, wanted a whole number of at least 0, or None"),
        ({"logprobs": True}, "logprobs: saw True, wanted a whole number of at least 0, or None"),
        ({"stop": [5]}, "stop: saw 5, wanted a text, or a list of texts"),
        ({"temperature": -1}, "temperature: saw -1, wanted a number of at least 0"),
        ({"temprature": 1}, "temprature: no such option; did you mean temperature?"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias: saw token id 288, wanted 0 to 287"),
    ],
)
def test_a_parameter_out_of_range_is_named(settings: dict[str, Any], text: str) -> None:
    model, prompt = scripted_model("abc")
    with pytest.raises(SettingError) as caught:
        model.generate(prompt, **settings)
    assert str(caught.value) == text
    assert model.generate(prompt, **GREEDY).text == "abc"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([1, VOCABULARY], "prompt: saw token id 288, wanted 0 to 287"),
        ([-1], "prompt: saw token id -1, wanted 0 to 287"),
        (b"bytes", "prompt: saw bytes b'bytes', wanted a text or whole numbers"),
        ([1.5], "prompt: saw list [1.5], wanted a text or whole numbers"),
        ([1, "1"], "prompt: saw list [1, '1'], wanted a text or whole numbers"),
        (None, "prompt: saw NoneType None, wanted a text or whole numbers"),
        ([], "the prompt is empty, and this model has no token to begin with; give it a text"),
    ],
)
def test_an_invalid_prompt_is_refused(prompt: Any, text: str) -> None:
    model, _ = scripted_model("abc")
    with pytest.raises(SettingError) as caught:
        model.generate(prompt)
    assert str(caught.value) == text


def test_ids_may_come_as_any_sequence_of_whole_numbers() -> None:
    model, prompt = scripted_model("abc")
    for given in (tuple(prompt), np.array(prompt), np.array(prompt, np.uint16), iter(prompt)):
        completion: Any = model.generate(given, **GREEDY)  # type: ignore[arg-type]
        assert completion.text == "abc"


def test_greedy_completions_do_not_depend_on_the_seed() -> None:
    model = model_on(FakeEngine(seeded_logits))
    completions = [model.generate(PROMPT, max_tokens=20, seed=seed, **GREEDY).ids for seed in (1, 2, None)]
    assert completions[0] == completions[1] == completions[2]


def test_a_seed_repeats_its_samples_and_another_seed_differs() -> None:
    model = model_on(FakeEngine(seeded_logits))
    first, again, other = (model.generate(PROMPT, max_tokens=20, seed=seed).ids for seed in (7, 7, 8))
    assert first == again != other


def test_without_a_seed_completions_differ() -> None:
    model = model_on(FakeEngine(seeded_logits))
    assert len({tuple(model.generate(PROMPT, max_tokens=20).ids) for _ in range(4)}) == 4


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    model = model_on(FakeEngine(seeded_logits))
    completion = model.generate(PROMPT, max_tokens=5, seed=3, logprobs=VOCABULARY + 5, temperature=2.0)
    history = list(PROMPT)
    for token in completion.tokens:
        logits = seeded_logits(history).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert token.logprob == pytest.approx(expected[token.id], abs=1e-5)
        assert len(token.top_logprobs) == VOCABULARY
        assert sum(math.exp(logprob) for _, logprob in token.top_logprobs) == pytest.approx(1, abs=1e-5)
        assert dict(token.top_logprobs)[token.id] == pytest.approx(token.logprob)
        values = [logprob for _, logprob in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        history.append(token.id)


def test_logprobs_zero_gives_the_sampled_token_only() -> None:
    model, prompt = scripted_model("ab")
    tokens = model.generate(prompt, logprobs=0, **GREEDY).tokens
    assert all(token.logprob is not None and token.top_logprobs == () for token in tokens)
    assert all(token.logprob is None for token in model.generate(prompt, **GREEDY).tokens)


def test_logits_that_hold_nan_are_an_error_and_the_model_stays_usable() -> None:
    engine = FakeEngine(scripted("abc", 3))
    model = model_on(engine)
    engine.logits_function = lambda ids: np.full(VOCABULARY, np.nan, np.float32)
    with pytest.raises(LogitsError, match="saw NaN for 288 of 288 tokens"):
        model.generate(PROMPT)
    engine.logits_function = scripted("abc", 3)
    assert model.generate(PROMPT, **GREEDY).text == "abc"


def test_a_completion_is_timed_and_counted() -> None:
    model, prompt = scripted_model("Hello")
    speed = model.generate(prompt, **GREEDY).speed
    assert (speed.prompt_tokens, speed.generated_tokens) == (3, 5)
    assert speed.seconds_to_first_token > 0
    assert speed.prompt_tokens_per_second > 0
    assert speed.decode_tokens_per_second > 0
    assert speed.gigabytes_per_second == pytest.approx(speed.decode_tokens_per_second * 1000 / 1e9)


def test_one_token_has_no_decoding_speed() -> None:
    model, prompt = scripted_model("Hello")
    speed = model.generate(prompt, max_tokens=1, **GREEDY).speed
    assert (speed.decode_tokens_per_second, speed.gigabytes_per_second) == (0.0, 0.0)


def test_the_result_of_an_unfinished_stream_is_the_completion_so_far() -> None:
    model, prompt = scripted_model("Hello")
    stream = model.stream(prompt, **GREEDY)
    assert stream.result.text == ""
    next(stream)
    next(stream)
    assert stream.result.text == "He"
    assert stream.result.speed.generated_tokens == 2


def test_any_of_several_eos_tokens_ends_a_completion() -> None:
    engine = FakeEngine(scripted("ab", 3))
    model = model_on(engine, metadata={"tokenizer.ggml.eot_token_id": byte_ids("b")[0]})
    completion = model.generate(PROMPT, **GREEDY)
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert {END, *byte_ids("b")} <= model.tokenizer.end_ids


@pytest.mark.parametrize(
    ("held", "expected", "count"),
    [
        *[([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2, 4], 2), ([1], [1, 2], 1), ([2], [1], 0)],
        (list(range(1000)), list(range(1000)), 1000),
        (list(range(1000)), [*range(600), 0, *range(601, 1000)], 600),
        (list(range(512)), list(range(700)), 512),
    ],
)
def test_the_shared_prefix_ends_at_the_first_difference(
    held: list[int], expected: list[int], count: int
) -> None:
    assert shared_prefix(held, expected) == count


@pytest.mark.parametrize("seed", range(8))
def test_a_cached_prefix_is_the_shared_one_after_any_changes_of_the_cache(seed: int) -> None:
    random = np.random.default_rng(seed)
    texts: list[list[int]] = [[], []]
    cache = KVCache(1000)
    for _ in range(200):
        text = texts[int(random.random() < 0.1)]
        change = random.random()
        if change < 0.5:
            text += random.integers(0, 3, random.integers(4)).tolist()
        elif change < 0.7:
            cache.append(
                text[len(cache.ids) :] if random.random() < 0.7 else random.integers(0, 3, 2).tolist()
            )
        elif change < 0.9:
            cache.rewind(int(random.integers(len(cache.ids) + 1)))
        elif cache.ids:
            cache.evict([int(random.integers(len(cache.ids)))])
        assert cache.cached_prefix(text) == shared_prefix(cache.ids, text)
