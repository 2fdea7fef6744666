"""Twenty-two vendors' templates render chats as Hugging Face transformers does."""

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.chat_templates.chat_format import ChatFormat
from edgeinfer.errors import ChatTemplateError

FOLDER = Path(__file__).parents[1] / "data" / "templates"
CONTENT: dict[str, Any] = json.loads((FOLDER / "goldens.json").read_text(encoding="utf-8"))
RENDERED_ONLY_HERE = {("Kimi-K2-Instruct.jinja", "tool call"): "list.append"}
"""Template and case -> what the original refuses and this sandbox allows."""
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.jinja"))


@functools.cache
def format_of(template: str) -> ChatFormat:
    return ChatFormat(
        (FOLDER / template).read_text(encoding="utf-8"),
        special_texts=CONTENT["special"],
        now=lambda: datetime.fromisoformat(CONTENT["now"]),
    )


def test_every_template_has_goldens() -> None:
    assert sorted(CONTENT["goldens"]) == TEMPLATES
    assert len(TEMPLATES) == 22


@pytest.mark.parametrize("case", CONTENT["cases"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_renders_as_hugging_face_renders_it(template: str, case: str) -> None:
    expected = CONTENT["goldens"][template][case]
    settings = dict(CONTENT["cases"][case])
    variables = settings.pop("variables", {})
    chat_format = format_of(template)
    if isinstance(expected, str):
        assert chat_format.render(**settings, **variables) == expected
        return
    if (template, case) in RENDERED_ONLY_HERE:
        assert "functions.get_weather:0" in chat_format.render(**settings, **variables)
        return
    with pytest.raises(ChatTemplateError) as caught:
        chat_format.render(**settings, **variables)
    assert expected["error"] in str(caught.value)
