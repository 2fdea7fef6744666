"""The built-in model gives the tokens of llama.cpp.

`data/tiny_stories.txt` holds stories that it generated (temperature 0.7, seeds 0 to 3).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.registry.registry import find_model
from tests.edgeinfer.test_logits_against_llama_cpp import logits_of

STORIES = (Path(__file__).parent / "data" / "tiny_stories.txt").read_text(encoding="utf-8").splitlines()
PROMPT = "Once upon a time"
PROMPT_IDS = [0, 564, 567, 263, 449]
GREEDY_IDS = [
    16,
    401,
    296,
    263,
    448,
    546,
    608,
    579,
    18,
    384,
    735,
    274,
    425,
    974,
    309,
    266,
    3371,
    18,
    721,
    394,
]
GREEDY_TEXT = ", there was a little girl named Lily. She loved to play outside in the sunshine. One day"
DRAFT = find_model("tiny").draft_path


def divergence(base: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Mean KL divergence of log probabilities (positions, vocabulary)."""
    return float((np.exp(base) * (base - other)).sum(axis=1).mean())


def log_probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def test_the_greedy_completion_equals_llama_cpp(tiny: Model) -> None:
    completion = tiny.generate(PROMPT, max_tokens=20, temperature=0.0)
    assert completion.prompt_ids == PROMPT_IDS
    assert completion.ids == GREEDY_IDS
    assert completion.text == GREEDY_TEXT


def test_it_chats_with_its_built_in_template(tiny: Model) -> None:
    chat = tiny.chat(system="Be kind.", temperature=0.0)
    first = chat.say("Hello!", max_tokens=12)
    second = chat.say("How are you?", max_tokens=12)
    assert first.text
    assert second.text
    assert second.speed.cached_tokens >= len(first.prompt_ids)
    assert "<|" not in first.text + second.text


@pytest.mark.slow
def test_its_chats_exceed_the_context_without_an_error() -> None:
    with edgeinfer.load("tiny", context=64, threads=2) as small:
        chat = small.chat(system="Be kind.", max_tokens=6, seed=1)
        dropped = [
            chat.say(f"Tell me about the fox number {number}.").dropped_messages for number in range(5)
        ]
        assert dropped[0] == 0
        assert dropped[-1] > 0
        assert chat.context_used <= 64


def test_its_draft_loads_too() -> None:
    assert DRAFT is not None
    with edgeinfer.load(DRAFT, threads=2) as draft, edgeinfer.load("tiny", threads=2) as target:
        assert draft.generate(PROMPT, max_tokens=10, temperature=0.0).ids == GREEDY_IDS[:10]
        assert draft.tokenizer.encode(STORIES[0]) == target.tokenizer.encode(STORIES[0])
        assert draft.engine.vocabulary_size == target.engine.vocabulary_size


@pytest.fixture(scope="module", params=["tiny", "draft"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Model]]:
    """A model with edgeinfer and with llama.cpp."""
    pytest.importorskip("llama_cpp")
    name = "tiny" if request.param == "tiny" else DRAFT
    with (
        edgeinfer.load(name, threads=2) as ours,
        # One thread: two that spin are slow on a busy machine.
        edgeinfer.load(name, engine="llama.cpp", threads=1) as theirs,
    ):
        yield ours, theirs


@pytest.mark.llama_cpp
def test_sixty_greedy_tokens_equal_llama_cpp_up_to_a_near_tie(pair: tuple[Model, Model]) -> None:
    completions = [model.generate(PROMPT, max_tokens=60, temperature=0.0, logprobs=2) for model in pair]
    assert completions[0].prompt_ids == completions[1].prompt_ids
    for actual, other in zip(completions[0].tokens, completions[1].tokens, strict=False):
        if actual.id != other.id:
            (_, best), (_, second) = other.top_logprobs
            assert best - second < 0.05
            break
    assert len(completions[0].ids) == 60


@pytest.mark.slow
@pytest.mark.llama_cpp
def test_distributions_on_generated_stories_equal_llama_cpp(pair: tuple[Model, Model]) -> None:
    """Both quantize activations to int8, each with its own rounding: only near-ties may differ, and ours are
    about as near to an exact evaluation.
    """
    path = find_model("tiny").path if pair[0].name == "tiny" else DRAFT
    assert path is not None
    rows = []
    for text in STORIES:
        ids = pair[0].tokenizer.encode(text, bos=True)
        assert ids == pair[1].tokenizer.encode(text, bos=True)
        logits = [*(model.logits(ids) for model in pair), logits_of(path, "exact", ids, context=256)]
        rows.append([log_probabilities(each) for each in logits])
    ours, theirs, exact = (np.concatenate(each) for each in zip(*rows, strict=True))
    assert len(ours) >= 500
    assert divergence(theirs, ours) < 1e-3
    assert divergence(exact, ours) <= 1.2 * divergence(exact, theirs)
    second, best = np.sort(exact, axis=1)[:, -2:].T
    decided = best - second >= 0.1
    assert decided.mean() > 0.9
    assert (ours.argmax(axis=1)[decided] == exact.argmax(axis=1)[decided]).all()
    if pair[0].name == "tiny":
        assert np.mean(ours.argmax(axis=1) == exact.argmax(axis=1)) >= 0.99
