"""Completions of repeated requests are returned again, in Python, over HTTP and in batches."""

import math
from dataclasses import replace
from typing import Any

import pytest

from edgeinfer.generation.completion_cache import CompletionCache, StoredStream
from edgeinfer.results import Generation, Speed, Token

pytestmark = pytest.mark.anyio
GREEDY = {"temperature": 0.0}
TOKENS = [Token(1, "a"), Token(2, "b")]
COMPLETION = Generation("ab", [1, 2], "stop", Speed(5, 2, 2, 0.5, 30.0, 9.0), [7] * 5, TOKENS)


def test_only_greedy_and_seeded_completions_have_a_key() -> None:
    cache = CompletionCache(4, {"temperature": 0.0})
    assert cache.key("a", {}) == cache.key("a", {"progress": print}) is not None
    assert cache.key("a", {"temperature": 0.7}) is None
    assert cache.key("a", {"temperature": 0.7, "seed": 1}) is not None
    assert cache.key("a", {"schema": {1, 2}}) is None
    assert CompletionCache(0, GREEDY).key("a", {}) is None
    assert CompletionCache(4, {}).key("a", {}) is None


def test_another_prompt_or_option_is_another_request() -> None:
    cache = CompletionCache(4, GREEDY)
    messages = [{"role": "user", "content": "a"}]
    requests: list[tuple[Any, dict[str, Any]]] = [
        ("a", {}), ("b", {}), (messages, {}), ("a", {"max_tokens": 3}), ("a", {"logit_bias": {5: -math.inf}}),
    ]  # fmt: skip
    keys = [cache.key(*request) for request in requests]
    assert len({*keys}) == len(requests)
    assert None not in keys
    cache.put(keys[0], COMPLETION)
    assert [cache.get(key) is not None for key in keys] == [True, False, False, False, False]


def test_a_stored_completion_took_no_time_and_its_prompt_was_cached() -> None:
    cache = CompletionCache(4, GREEDY)
    cache.put("key", COMPLETION)
    stored = cache.get("key")
    assert stored == replace(COMPLETION, speed=Speed(5, 5, 2))
    assert cache.get(None) is None


def test_the_least_recently_used_completion_goes_first() -> None:
    cache = CompletionCache(2, GREEDY)
    cache.put("a", COMPLETION)
    cache.put("b", COMPLETION)
    assert cache.get("a") is not None
    cache.put("c", COMPLETION)
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]


def test_a_completion_that_was_cancelled_is_not_stored() -> None:
    cache = CompletionCache(2, GREEDY)
    cache.put("a", replace(COMPLETION, finish_reason="cancelled"))
    cache.put(None, COMPLETION)
    assert cache.get("a") is None


async def test_a_stored_stream_has_the_tokens_of_the_completion() -> None:
    stream = StoredStream(COMPLETION)
    assert [token async for token in stream] == TOKENS
    assert stream.result is COMPLETION
    await stream.aclose()
