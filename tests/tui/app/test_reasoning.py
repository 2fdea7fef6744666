"""A model's reasoning is separated from its response."""

import pytest

from edgeinfer.chat_templates.reasoning import (
    Reply,
    closing_mark,
    parted,
    with_closed_reasoning,
    without_reasoning,
)
from tests.tui.app.conftest import Opened, PacedModel
from tests.tui.fake_library import FakeModel

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("text", "reasoning", "response"),
    [
        ("Hello.", "", "Hello."),
        ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello."),
        ("<think>\n\n</think>\n\nHello.", "", "Hello."),
        ("[THINK]Hm.[/THINK]Hello.", "Hm.", "Hello."),
        ("Hm.\n</think>\nHello.", "Hm.", "Hello."),
        ("<think>One</think><think>Two</think>Hello.", "One\n\nTwo", "Hello."),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
            "Hm.",
            "Hello.",
        ),
        ("<|channel>thought\nHm.\n<channel|>Hello.", "Hm.", "Hello."),
        ("Hm.<channel|>Hello.", "Hm.", "Hello."),
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hm.", "Hello."),
        ("Hm.<|close|>think<|sep|><|open|>response<|sep|>Hello.<|close|>response<|sep|>", "Hm.", "Hello."),
        (" to=self<|message|>Hm.<|eom|><|start|>assistant<|message|>Hello.", "Hm.", "Hello."),
        ("<|think|>Hm.<|end|><|begin|>assistant<|content|>Hello.", "Hm.", "Hello."),
        ("<mm:think>Hm.</mm:think>Hello.", "Hm.", "Hello."),
        ("Write <think> and </think>.", "", "Write <think> and </think>."),
    ],
)
def test_reasoning_comes_before_the_response(text: str, reasoning: str, response: str) -> None:
    reply = parted(text)
    assert (reply.reasoning.strip(), reply.response) == (reasoning, response)
    assert not reply.thinking


def test_reasoning_opened_by_the_template_ends_at_its_tag() -> None:
    assert parted("Hm.", opened=True, ended=False) == Reply("Hm.", "", True)
    assert parted("Hm.</think>Hi", opened=True, ended=False) == Reply("Hm.", "Hi")


def test_a_partial_tag_is_not_shown_while_incomplete() -> None:
    text = "<think>Hm.</think>Hello <b>"
    for length in range(len(text) + 1):
        reply = parted(text[:length], ended=False)
        assert "Hm.".startswith(reply.reasoning)
        assert "Hello <b>".startswith(reply.response)
    assert parted("<thi", ended=True).response == "<thi"


def test_a_prompt_that_ends_with_an_open_reasoning_tag_is_recognized() -> None:
    assert closing_mark("<|assistant|><think>\n") == "</think>"
    assert with_closed_reasoning("<|assistant|><think>\n") == "<|assistant|><think>\n\n</think>\n\n"
    for whole in ("<|assistant|><think>\n\n</think>\n\n", "<|assistant|>\n"):
        assert closing_mark(whole) is None
        assert with_closed_reasoning(whole) == whole


@pytest.mark.parametrize(
    ("text", "output"),
    [(" Hello. ", " Hello. "), ("<think>Hm.</think> Hello.", "Hello."), ("Hm.</think>\nHi", "Hi"), ("", "")],
)
def test_the_text_without_reasoning_is_the_response(text: str, output: str) -> None:
    assert without_reasoning(text) == output


async def test_reasoning_is_folded_and_unfolds_with_a_key(opened: Opened) -> None:
    async with opened(FakeModel("<think>A red one.</think>There was a fox.")) as chat:
        await chat.say("Hi")
        reasoning = chat.views()[1].query_one("ReasoningView")
        assert str(reasoning.render()) == "> reasoning (3 words)"
        await chat.press("tab", "t")
        assert str(reasoning.render()) == "v reasoning (3 words)\nA red one."
        assert chat.shown()[1] == "There was a fox."


async def test_words_of_reasoning_in_progress_are_counted(opened: Opened) -> None:
    model = PacedModel("<think>A red one. </think> Yes.")
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(2)
        await chat.until(lambda: len(chat.views()) == 2)
        reasoning = chat.views()[1].query_one("ReasoningView")
        await chat.until(lambda: "2 words" in str(reasoning.render()))
        assert "thinking" in str(reasoning.render())
        model.allow(99)
