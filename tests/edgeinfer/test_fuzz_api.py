"""Thousands of invalid calls of the Python API: each returns or raises one of edgeinfer's errors."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import EdgeInferError
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.mutations import ODD, nested
from tests.random_models import CHAT_TEMPLATE

CALLS = 4_000
LOADS = 400
ONLY_PYTHON: tuple[Any, ...] = (
    *(b"x", bytearray(b"\x00"), object(), int, range(3), {1, 2}, 3 + 4j, np.float32(0.5), np.int64(3)),
    *(np.arange(3), float("nan"), float("inf"), Path("x"), Path("\ud800"), len, nested(3_000)),
)
SETTINGS = (
    *(
        "max_tokens",
        "stop",
        "logprobs",
        "raw",
        "tools",
        "schema",
        "grammar",
        "context_overflow",
        "progress",
        "n",
    ),
    *("best_of", "beams", "temperature", "top_k", "top_p", "seed", "logit_bias", "dry_sequence_breakers"),
    *("repeat_last_n", "mirostat", "xtc_probability", "typical_p", "wrong"),
)
LOADING = (
    *("model", "context", "device", "vram", "ram", "threads", "repack", "sparse", "instruction_set", "draft"),
    *(
        "draft_tree_width",
        "lookup_files",
        "kv",
        "engine",
        "chat_template",
        "assume_pre_tokenizer",
        "snapshots",
    ),
    *("progress", "build_progress"),
)


def odd(source: random.Random) -> Any:
    return source.choice((*ODD, *ONLY_PYTHON))


def call(model: Model, source: random.Random) -> Any:
    """One call with an invalid argument."""
    kind = source.choice(("prompt", "setting", "setting", "setting", "chat", "embed", "logits", "messages"))
    if kind == "prompt":
        return model.generate(odd(source), max_tokens=3)
    if kind == "setting":
        settings = {name: odd(source) for name in source.sample(SETTINGS, source.choice((1, 1, 2)))}
        if callable(settings.get("progress")):  # the caller's functions may raise anything
            del settings["progress"]
        return model.generate("Hi", **{"max_tokens": 3, **settings})
    if kind == "chat":
        wrong = {source.choice(("system", *SETTINGS)): odd(source)}
        output = source.choice(("Hi", odd(source)))
        limit: Any = {} if "max_tokens" in wrong else {"max_tokens": 3}
        return model.chat(**wrong).say(output, **limit)
    if kind == "embed":
        wrong = {source.choice(("pooling", "normalize")): odd(source)}
        return model.embed(source.choice(("Hi", odd(source))), **wrong)
    if kind == "logits":
        return model.logits(odd(source))
    message = {"role": "user", "content": "Hi"}
    message[source.choice(("role", "content", "tool_calls", "x"))] = odd(source)
    return model.generate([message], max_tokens=3)


def run_call(work: Callable[[], Any], counts: Counter[str]) -> None:
    """Count how a call ended; any other exception fails the test."""
    try:
        work()
        counts["answered"] += 1
    except (EdgeInferError, OSError) as error:
        text = str(error)
        assert text
        assert "\n" not in text, text
        assert len(text) < 1_000, text
        counts["refused"] += 1


@pytest.mark.slow
def test_thousands_of_invalid_calls_return_or_give_a_one_line_error(scaled: Callable[[int], int]) -> None:
    source, calls = random.Random(43), scaled(CALLS)
    counts: Counter[str] = Counter()
    model = model_on(FakeEngine(seeded_logits, 64), "{{ tools }}" + CHAT_TEMPLATE)
    for _ in range(calls):
        run_call(lambda: call(model, source), counts)
    print(dict(counts))
    assert counts.total() == calls
    assert counts["answered"] > calls // 20
    assert counts["refused"] > calls // 4


@pytest.mark.slow
def test_invalid_keywords_of_load_give_a_one_line_error(scaled: Callable[[int], int]) -> None:
    source, loads = random.Random(44), scaled(LOADS)
    counts: Counter[str] = Counter()
    for _ in range(loads):
        wrong = {"model": "nowhere.gguf", source.choice(LOADING): odd(source)}
        run_call(lambda wrong=wrong: edgeinfer.load(**wrong).close(), counts)  # type: ignore[misc]
    print(dict(counts))
    assert counts["refused"] >= loads * 0.9
