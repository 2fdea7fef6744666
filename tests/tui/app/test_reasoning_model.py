"""A reasoning model, from its template to the screen, and responses that follow a schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer import Model
from edgeinfer.history.store import ChatStore
from edgeinfer_tui.app.model_status import StatusBar
from tests.edgeinfer.fake_engine import END, FakeEngine, byte_ids, model_on
from tests.random_models import VOCABULARY, vocabulary_metadata
from tests.tui.app.conftest import Chat, Opened
from tests.tui.fake_library import ANSWER, FakeModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TEMPLATE_START = (
    "{% for m in messages %}{{ m.role[0] | upper }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}A"
)
OPENING, PLAIN = TEMPLATE_START + "<think>\n{% endif %}", TEMPLATE_START + "{% endif %}"
OPEN, CLOSE = VOCABULARY - 2, VOCABULARY - 1
"""Of the tags, which are control tokens here as in some models."""
SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [7]}},
    "required": ["age"],
    "additionalProperties": False,
}


class ReasoningModel:
    """Emits reasoning, then the number of letters of the message."""

    def __init__(self, template: str, context: int = 512) -> None:
        metadata = vocabulary_metadata()
        tokens = metadata["tokenizer.ggml.tokens"]
        tokens[OPEN], tokens[CLOSE] = "<think>", "</think>"
        self.prompts: list[str] = []
        self._opening = "<think>\n" if "<think>" in template else ""
        self.engine = FakeEngine(self._logits, context)
        self.model: Model = model_on(
            self.engine,
            template,
            {
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.scores": np.zeros(VOCABULARY, np.float32),
            },
        )

    def _logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        text = self.model.tokenizer.decode(ids, special=True).removeprefix("<s>")
        user_message, _, output = text.rpartition("</s>A")
        if output in (self._opening, "<think>\n\n</think>\n\n"):
            self.prompts.append(text)
        response = f"It has {len(user_message.rpartition('U')[2])}."
        script = [OPEN, *byte_ids("Hm, let me see."), CLOSE, *byte_ids("\n\n" + response), END]
        if output.startswith("<think>"):
            output = output.removeprefix("<think>").removeprefix("\n").replace("</think>", "*")
            script, position = script[1:], len(output)
        else:
            position = 0
        logits = np.zeros(VOCABULARY, np.float32)
        logits[script[min(position, len(script) - 1)]] = 30
        return logits


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    pytest.importorskip("llguidance")
    path = tmp_path / "age.json"
    path.write_text(json.dumps(SCHEMA))
    return path


def status(chat: Chat) -> str:
    return str(chat.screen.query_one(StatusBar).render())


@pytest.mark.parametrize("template", [OPENING, PLAIN])
async def test_reasoning_is_folded_and_not_in_the_next_prompt(opened: Opened, template: str) -> None:
    reasoning_model = ReasoningModel(template)
    async with opened(reasoning_model.model, generation={"temperature": 0.0}) as chat:
        await chat.say("fox")
        assert chat.shown() == ["fox", "It has 3."]
        reasoning = chat.views()[1].query_one("ReasoningView")
        assert str(reasoning.render()) == "> reasoning (4 words)"
        await chat.press("tab", "t")
        assert str(reasoning.render()) == "v reasoning (4 words)\nHm, let me see."
        await chat.press("shift+tab")
        await chat.say("bear")
        assert chat.shown()[2:] == ["bear", "It has 4."]
        ending = "<think>\n" if template == OPENING else ""
        assert reasoning_model.prompts[-1] == f"Ufox</s>AIt has 3.</s>Ubear</s>A{ending}"
        assert "</think>\n\nIt has 4." in chat.messages()[3].text
        await chat.press("ctrl+y")
        assert chat.app.clipboard == "It has 4."


async def test_interrupted_reasoning_is_shown_separately_after_reopening(
    opened: Opened, tmp_path: Path
) -> None:
    async with opened(FakeModel("<think>A red one")) as chat:
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ""]
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (stored,) = store.chats()
    async with opened(FakeModel(), stored=stored) as chat:
        assert chat.shown() == ["Hi", ""]
        assert str(chat.views()[1].query_one("ReasoningView").render()) == "> reasoning (3 words)"


async def test_a_schema_applies_after_the_reasoning(opened: Opened, schema: Path) -> None:
    reasoning_model = ReasoningModel(OPENING)
    # Spaces are the most probable of the disallowed tokens.
    settings = {"temperature": 0.0, "logit_bias": dict.fromkeys(byte_ids(" \t\n"), -20.0)}
    async with opened(reasoning_model.model, generation=settings) as chat:
        await chat.say(f"/schema {schema}")
        await chat.say("fox")
        assert json.loads(chat.shown()[1]) == {"age": 7}
        assert not chat.views()[1].query_one("ReasoningView").display
        assert reasoning_model.prompts[-1] == "Ufox</s>A<think>\n\n</think>\n\n"
        await chat.say("/schema off")
        await chat.say("bear")
        assert chat.shown()[3] == "It has 4."


async def test_a_schema_is_set_shown_and_removed(opened: Opened, schema: Path) -> None:
    model = FakeModel()
    async with opened(model, generation={"grammar": 'root ::= "a"'}) as chat:
        assert "by a grammar" in status(chat)
        await chat.say(f"/schema {schema}")
        assert "JSON by a schema" in status(chat)
        await chat.say("Hi")
        await chat.say("/schema")
        await chat.say("/schema off")
        await chat.say("/schema")
        assert "schema" not in status(chat)
        await chat.say("And?")
        message = chat.notices()
    assert model.settings == [{"schema": schema.read_text()}, {}]
    assert (
        "responses are constrained; /schema off ends that; /schema FILE: constrain them to a JSON schema"
        in message
    )
    assert "responses are not constrained; /schema FILE: constrain them to a JSON schema" in message


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "schema: saw no JSON"),
        (b"[1]", "schema: saw list"),
        (b"\xff", "byte 0 isn't UTF-8"),
    ],
)
async def test_an_invalid_schema_changes_nothing(
    opened: Opened, schema: Path, content: bytes | None, message: str
) -> None:
    if content is None:
        schema.unlink()
    else:
        schema.write_bytes(content)
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say(f"/schema {schema}")
        assert any(message in notice for notice in chat.notices())
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]
    settings: list[dict[str, Any]] = [{}]
    assert model.settings == settings
